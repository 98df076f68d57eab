"""Decisions: what a policy proposes for one request, always with its reason.

A reason is a member of a closed list, so that `twinpool_decisions_total{choice,reason}` stays countable.
"""

from enum import StrEnum

import msgspec

from twinpool.core.roles import Role


class Choice(StrEnum):
    """The ways a request can go."""

    DISAGGREGATED = "disaggregated"  # prefill on one worker, decode on another
    COLOCATED = "colocated"  # one worker does all
    WAIT = "wait"  # stays in the router's queue
    REFUSE = "refuse"


class Why(StrEnum):
    """The reasons for a choice."""

    PAIR_READY = "pair_ready"  # a prefill and a decode worker are up and have room
    NO_PREFILL_WORKER = "no_prefill_worker"  # nobody reads prompts for others
    NO_DECODE_WORKER = "no_decode_worker"
    NO_PAIR = "no_pair"  # both are up, but no two of them speak the same handoff
    PAIR_UNPROVED = "pair_unproved"  # two of them do, but no handoff between them has been seen to arrive
    PAIR_ASIDE = "pair_aside"  # ... but handoffs between them went wrong, and none has arrived since
    HANDOFF_FAILED = "handoff_failed"  # it was tried, and did not work for this request
    N_CHOICES = "n_choices"  # several answers to one prompt: one handle serves one
    BEST_OF = "best_of"  # the same, of which the best is kept
    BEAM_SEARCH = "beam_search"  # the same, in parallel
    PROMPT_LIST = "prompt_list"  # several prompts in one request
    PROMPT_LOGPROBS = "prompt_logprobs"  # wants what only the reading engine knows, in the writing engine's answer
    ECHO = "echo"  # the same, with the prompt
    PROMPT_EMBEDS = "prompt_embeds"  # the prompt is no tokens: nothing says that KV of it can be handed over
    OTHER_ROUTE = "other_route"  # embeddings, scores and the like: nothing is decoded
    PREFILL_BUSY = "prefill_busy"  # every prefill worker has a full window
    DECODE_BUSY = "decode_busy"  # no decode worker has a free slot
    WORKERS_BUSY = "workers_busy"
    NO_WORKER = "no_worker"  # nobody serves this model now
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DECODE_SOONER = "decode_sooner"  # one worker that decodes can read it beside, and answers first
    DECODE_FULL = "decode_full"  # no decode worker can take one more: the one that reads it writes the answer too
    ONE_POOL_BETTER = "one_pool_better"  # two pools carry less of this traffic
    LATE = "late"  # it would miss its objective, as far as one can tell
    DRAINING = "draining"  # the gateway is ending


class WhyBalance(StrEnum):
    """The reasons for a role, and for leaving roles as they are."""

    MANUAL = "manual"  # a person asked
    PREFILL_SHORT = "prefill_short"  # prompts are more than their pool can read
    DECODE_SHORT = "decode_short"  # answers are more than their pool can write
    POOL_EMPTY = "pool_empty"  # nobody was left in a pool
    NOT_KNOWN = "not_known"  # nothing is known of costs yet
    FIXED = "fixed"  # no worker may change, or all who may are held by a person
    ALONE = "alone"  # one worker does everything
    IDLE = "idle"  # nothing is asked for
    EASY = "easy"  # no pool has much to do
    GOOD = "good"  # no other split is better by enough to be worth a change
    RESTING = "resting"  # a change was made just now
    SETTLING = "settling"  # another split looks better, but not for long enough
    ONE_POOL = "one_pool"  # everybody does everything: two pools carry less of this traffic
    HOPELESS = "hopeless"  # a step alone is over the objective: no split can meet it


class Forecast(msgspec.Struct, frozen=True, omit_defaults=True):
    """The TTFT in seconds that each way should have from now on; None for a way that is not open. What was chosen less the
    least of them is the regret that other reasons (room, the ITL objective) were worth."""

    pair_s: float | None = None  # prefill on one, decode on another: at once, or after a wait
    decode_s: float | None = None  # all on one that decodes
    prefill_s: float | None = None  # all on one that prefills


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """One choice for one request. `prefill` and `decode` are worker ids; a colocated request has only `decode`.

    `read_s` is how long the reading worker should take for its prompt, `forecast` what was weighed; where nothing is known of
    costs there is neither.
    """

    choice: Choice
    why: Why
    prefill: str | None = None
    decode: str | None = None
    cached_tokens: int = 0  # of the prompt, that the reading worker should hold already
    read_s: float = 0.0
    forecast: Forecast | None = None

    @property
    def predicted_ttft_s(self) -> float | None:
        """From now to the first token, the way that was chosen; who must wait goes over a pair in the end. None where nothing
        was predicted."""
        if self.forecast is None:
            return None
        if self.choice is not Choice.COLOCATED:
            return self.forecast.pair_s
        return self.forecast.prefill_s if self.why is Why.DECODE_FULL else self.forecast.decode_s


class Balanced(msgspec.Struct, frozen=True, omit_defaults=True):
    """What balance found: the pressure of this split (the share that the present traffic is of what it carries), of the best
    one and of one pool; why it proposes that `worker` takes `role`, or why nothing."""

    why: WhyBalance
    prefill: int = 0
    decode: int = 0
    best_prefill: int | None = None
    pressure: float | None = None
    best_pressure: float | None = None
    one_pool_pressure: float | None = None
    is_one_pool: bool = False
    worker: str | None = None
    role: Role | None = None
