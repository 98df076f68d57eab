"""Decisions: what a policy proposes for one request, always with its reason.

A reason is a member of a closed list, so that `twinpool_decisions_total{choice,reason}` stays countable.
"""

from enum import StrEnum

import msgspec


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
    DRAINING = "draining"  # the gateway is ending


class Decision(msgspec.Struct, frozen=True):
    """One choice for one request. `prefill` and `decode` are worker ids; a colocated request has only `decode`."""

    choice: Choice
    why: Why
    prefill: str | None = None
    decode: str | None = None
