"""Events: what happened, in the past tense. The only way anything enters the controller.

`at` is in seconds on the driver's clock, and is the only clock the core knows. An event about a leg names the `attempt` it
belongs to: news of an attempt that was given up is stale and changes nothing.
"""

import msgspec

from twinpool.core.model import Failure, Leg, RequestFacts, Role, Usage, WorkerFacts
from twinpool.measure.timeline import Timeline


class _Event(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    at: float


class RequestArrived(_Event, frozen=True):
    request: str
    facts: RequestFacts


class PrefillFinished(_Event, frozen=True):
    """P read the prompt and answered with a handle (or, where both legs run at once, without one). `cached_tokens`: so many of
    it P had already; None where it does not tell."""

    request: str
    attempt: int
    prompt_tokens: int
    cached_tokens: int | None = None


class FirstTokenArrived(_Event, frozen=True):
    """The first token with content came, and is on its way to the client: from here on the answer cannot be begun anew."""

    request: str
    attempt: int


class RequestFinished(_Event, frozen=True):
    """The answer went out whole. `usage` is None where the engine did not tell it; then `written` is about how many tokens the
    relay saw."""

    request: str
    attempt: int
    timeline: Timeline
    usage: Usage | None = None
    written: int | None = None


class LegFailed(_Event, frozen=True):
    request: str
    attempt: int
    leg: Leg
    failure: Failure
    status: int | None = None
    retry_after_s: float | None = None
    can_continue: bool = False
    """The client has part of a stream, and another engine could go on with it."""


class ClientLeft(_Event, frozen=True):
    request: str


class HandleReleased(_Event, frozen=True):
    """The answer to a `ReleaseHandle`: `freed` is False where nobody confirmed it, and the lease must end it."""

    request: str
    attempt: int
    freed: bool


class HandoffProved(_Event, frozen=True):
    """A canary arrived: D wrote what P's KV says, and the KV had moved. `took_s` is the whole canary; `moved_bytes` in
    `moved_s` seconds where an engine counts them."""

    canary: int
    took_s: float
    moved_bytes: int | None = None
    moved_s: float | None = None


class HandoffNotProved(_Event, frozen=True):
    """A canary did not arrive, and why, in words for people. One that was not `was_tried` never set out, on an engine that was
    busy or away: it says nothing of the pair."""

    canary: int
    took_s: float
    why: str
    was_tried: bool = True


class WorkerJoined(_Event, frozen=True):
    """A probe found the worker well: for the first time, again after a loss, or as a new incarnation."""

    facts: WorkerFacts


class WorkerLost(_Event, frozen=True):
    """`is_gone`: its process has ended, or nothing listens there any more; else it is only silent."""

    worker: str
    reason: str
    is_gone: bool = False


class WorkerRemoved(_Event, frozen=True):
    worker: str


class DrainAsked(_Event, frozen=True):
    worker: str


class RoleAsked(_Event, frozen=True):
    """A person asked for this role; it holds until the next one asks, or lets go of it."""

    worker: str
    role: Role


class RoleReleased(_Event, frozen=True):
    """A person lets go of the role they asked for: balance may change it again."""

    worker: str


class LoadReported(_Event, frozen=True):
    """What an engine says of its own load, `age_s` seconds before `at`: others may use it too. None for what it does not
    tell."""

    worker: str
    age_s: float = 0.0
    running: int | None = None
    waiting: int | None = None
    kv_used_ratio: float | None = None


class GatewayDrained(_Event, frozen=True):
    """The gateway was told to end: what runs may finish, nothing new is taken."""


class TimePassed(_Event, frozen=True):
    """The wake-up that `next_wakeup` asked for."""


Event = (
    RequestArrived
    | PrefillFinished
    | FirstTokenArrived
    | RequestFinished
    | LegFailed
    | ClientLeft
    | HandleReleased
    | HandoffProved
    | HandoffNotProved
    | WorkerJoined
    | WorkerLost
    | WorkerRemoved
    | DrainAsked
    | RoleAsked
    | RoleReleased
    | LoadReported
    | GatewayDrained
    | TimePassed
)
