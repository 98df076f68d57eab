"""The words the core speaks in: roles, legs, what is known of a worker and of a request.

Records are frozen `msgspec.Struct`s: they are built several times a request, cost a third of a frozen dataclass, and are what
the journal writes and reads without a second description of their shape (see `docs/decisions.md`).
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from twinpool.config import Count
from twinpool.core.decisions import Why
from twinpool.core.roles import Role as Role


class Leg(StrEnum):
    """One request to one engine on behalf of a client's request."""

    PREFILL = "prefill"  # reads the prompt, answers with a handle
    DECODE = "decode"  # pulls the KV, writes every token
    WHOLE = "whole"  # one engine does both


class Dialect(StrEnum):
    """How a pair of engines hands KV over, which also fixes the order of the legs."""

    NIXL = "nixl"  # one after the other: P answers with a handle that D is given
    SGLANG = "sglang"  # both at once, tied by a bootstrap room


class Failure(StrEnum):
    """What became of a leg that did not end well; the controller decides by this what to do next."""

    REJECTED = "rejected"  # 4xx: the request is at fault, never the worker
    BUSY = "busy"  # 429 or 503: back-pressure, not death
    ERROR = "error"  # 5xx, or an error inside the answer
    UNREACHABLE = "unreachable"  # no connection
    BROKEN = "broken"  # the connection ended inside the answer
    TIMED_OUT = "timed_out"
    NO_HANDLE = "no_handle"  # a prefill answered without a handle
    RESTARTED = "restarted"  # another engine answers at the worker's address: what the old one did is gone
    HANDLE_REFUSED = "handle_refused"  # a decode said that the handle is spent, expired or not its own
    SUSPECT = "suspect"  # the first token came so late that nobody can say what KV it was written from
    MISCOUNTED = "miscounted"  # the two engines do not agree on how many tokens the prompt has


PREFIX_BLOCK_TOKENS = 512
"""Of a prompt, for each number of `RequestFacts.prefix`."""


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe and the configuration say of a worker. `incarnation` changes whenever its engine restarts.

    `slots` (sequences at once), `context_tokens`, `lease_s`, `kv_capacity_tokens` and `budget_tokens` (tokens a step) are None
    where the engine does not tell. A worker that does not serve_whole (a decode server of SGLang) cannot read a prompt itself.

    `dialect` is None where it cannot hand over at all, and `obstacle` says why, in words for `twinpool status`. What two
    workers must have in common to hand KV over stands in the `fingerprint`, as far as it is known; see `core.compatibility`.
    """

    worker: str
    url: str
    incarnation: str
    engine: str
    models: tuple[str, ...]
    role: Role
    allowed_roles: tuple[Role, ...]
    dialect: Dialect | None = None
    slots: int | None = None
    context_tokens: int | None = None
    lease_s: float | None = None
    serves_whole: bool = True
    continues: bool = False  # can go on with an answer that another engine began
    fingerprint: tuple[tuple[str, str], ...] = ()  # (what, value), in the order in which a difference is named
    tensor_parallel: Count = 1
    vouches: bool = False  # verifies each handle itself and refuses what is not its own: its pairs need no other proof
    reads_handoffs: bool = True  # False: must never be given a handle, as a vLLM launched `kv_producer`
    gives_handoffs: bool = True  # False: must never be asked for one, as a vLLM launched `kv_consumer`
    has_metrics: bool = False
    obstacle: str | None = None
    loras: tuple[str, ...] = ()  # those of `models` that are adapters on another
    kv_capacity_tokens: int | None = None
    block_tokens: int | None = None  # KV is handed over in whole blocks
    kv_token_bytes: int | None = None  # over all its devices, within a thousandth
    budget_tokens: int | None = None
    kind: str = ""  # embedded, vllm, sglang, llama.cpp, openai
    version: str | None = None
    connector: str | None = None  # as declared, or as its metrics show it
    kv_role: str | None = None


def kind_of(facts: WorkerFacts) -> str:
    """Workers of one kind take the same time for the same work. Room for KV is told to two digits: it differs a little from
    start to start. What is not known is left out."""
    models = " ".join(model for model in facts.models if model not in facts.loras)
    budget = "" if facts.budget_tokens is None else f" budget {facts.budget_tokens}"
    room = "" if facts.kv_capacity_tokens is None else f" kv {facts.kv_capacity_tokens:.1e}"
    return f"{facts.engine} {models} tp{facts.tensor_parallel}{budget}{room}"


class Incarnation(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One life of a worker's engine: what must still be known of it when its leg or its handle ends."""

    worker: str
    incarnation: str
    lease_s: float | None = None
    vouches: bool = False


Priority = Annotated[int, msgspec.Meta(ge=-100, le=100)]


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What routing reads from a request, and nothing else of it.

    `prompt_chars` counts the characters of the prompt, `is_ascii` says of what kind they are: the estimate turns them into
    tokens. `obstacle` says why the request cannot be handed over between engines, None when it can. `sequences` is how many
    answers it asks for. `max_tokens` is None when the client left it out. `prefix` names the prompt's beginning by blocks of
    `PREFIX_BLOCK_TOKENS`: each number stands for all of the text up to the end of its block, for the model, its adapter and the
    tenant's salt; it is empty where that is not known.

    `tenant` names whose request it is, among whom turns are shared fairly: a name, never a key, since the journal has it. Among
    one tenant's requests those of a higher `priority` go first.
    """

    model: str
    endpoint: str
    stream: bool
    prompt_chars: int
    is_ascii: bool = True
    sequences: int = 1
    max_tokens: int | None = None
    obstacle: Why | None = None
    prefix: tuple[int, ...] = ()
    tenant: str = ""
    priority: Priority = 0


TokenCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""Of one answer, as an engine tells it. What is none of these was not counted."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the engine counted them; `cached_tokens` of the prompt is None where it does not tell."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
