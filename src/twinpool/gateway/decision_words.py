"""Why a request went the way it did, in plain words: for the page, `twinpool status` and `GET /admin/decisions`."""

from twinpool.core.decisions import Choice, Decision, Why

_BECAUSE = {
    Why.PAIR_READY: "both have room",
    Why.NO_PREFILL_WORKER: "no worker reads prompts for others",
    Why.NO_DECODE_WORKER: "no worker writes answers for others",
    Why.NO_PAIR: "no two workers can hand over to each other",
    Why.PAIR_UNPROVED: "no handoff has been seen to arrive yet",
    Why.PAIR_ASIDE: "handoffs between the pools went wrong, and none has arrived since",
    Why.HANDOFF_FAILED: "its handoff was tried and did not work",
    Why.N_CHOICES: "it wants several answers",
    Why.BEST_OF: "it wants the best of several answers",
    Why.BEAM_SEARCH: "it wants a beam search",
    Why.PROMPT_LIST: "it has several prompts",
    Why.PROMPT_LOGPROBS: "it wants the log-probabilities of its prompt",
    Why.ECHO: "it wants its prompt back",
    Why.PROMPT_EMBEDS: "its prompt is no text",
    Why.OTHER_ROUTE: "nothing is written on this route",
    Why.PREFILL_BUSY: "every prefill worker has enough to read",
    Why.DECODE_BUSY: "no decode worker has room",
    Why.WORKERS_BUSY: "no worker has room",
    Why.NO_WORKER: "no worker serves this model now",
    Why.QUEUE_FULL: "the queue is full",
    Why.QUEUE_TIMEOUT: "it waited too long",
    Why.DECODE_SOONER: "that answers sooner than a handoff",
    Why.DECODE_FULL: "no decode worker can take one more",
    Why.ONE_POOL_BETTER: "two pools would carry less of this traffic",
    Why.LATE: "it would be too late",
    Why.DRAINING: "the gateway is ending",
}


def words(decision: Decision) -> str:
    """One sentence, without a full stop."""
    return f"{_way(decision)}: {_BECAUSE[decision.why]}"


def _way(decision: Decision) -> str:
    if decision.choice is Choice.DISAGGREGATED:
        return f"{decision.prefill} reads, {decision.decode} writes"
    if decision.choice is Choice.COLOCATED:
        return f"{decision.decode} does all of it"
    return "waits" if decision.choice is Choice.WAIT else "refused"
