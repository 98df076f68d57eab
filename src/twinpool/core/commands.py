"""Commands: what the driver must do, in the imperative. The only thing that leaves the controller.

A handle never appears in one: the driver keeps it under (request, attempt), so that no journal can leak it.
"""

import msgspec

from twinpool.core.decisions import Balanced, Decision, WhyBalance
from twinpool.core.lifecycle import PairState
from twinpool.core.model import Leg, Role
from twinpool.errors import Reason


class _Command(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    pass


class RecordDecision(_Command, frozen=True):
    """Count the decision and show it to whoever asks why."""

    request: str
    attempt: int
    decision: Decision


class SendPrefill(_Command, frozen=True):
    request: str
    attempt: int
    worker: str


class SendDecode(_Command, frozen=True):
    """Send the decode leg: with the handle of this attempt, or beside its prefill leg where the dialect runs both at once.

    A first token after `trusted_until` must not reach the client before P has shown that it kept the KV that long; None where
    the engines see to that themselves.
    """

    request: str
    attempt: int
    worker: str
    prefill_worker: str
    trusted_until: float | None = None


class SendWhole(_Command, frozen=True):
    request: str
    attempt: int
    worker: str


class CancelLeg(_Command, frozen=True):
    request: str
    attempt: int
    leg: Leg


class BreakLeg(_Command, frozen=True):
    """The engine of this streaming leg is gone, whatever its connection says: end it, and report it as `RESTARTED`."""

    request: str
    attempt: int
    leg: Leg


class ReleaseHandle(_Command, frozen=True):
    """Give back what `worker` holds for this attempt, and say with `HandleReleased` whether that worked. Where the engine has
    no way to be told, `reader` may read it and drop what it read; None where nobody may read it any more."""

    request: str
    attempt: int
    worker: str
    reader: str | None = None


class FailRequest(_Command, frozen=True):
    """End the request with an error of ours: an HTTP answer, or one event in the stream where that has begun."""

    request: str
    status: int
    reason: Reason
    retry_after_s: int | None = None


class RelayFailure(_Command, frozen=True):
    """End the request with what the engine answered to its last leg, status and body as they came."""

    request: str


class ProbeWorker(_Command, frozen=True):
    """Look at once whether the worker is well."""

    worker: str


class ProveHandoff(_Command, frozen=True):
    """Hand a canary from `prefill` to `decode`, and say with `HandoffProved` or `HandoffNotProved` what became of it."""

    canary: int
    prefill: str
    decode: str


class RecordRole(_Command, frozen=True):
    """The worker stands in another pool from now on."""

    worker: str
    role: Role
    reason: WhyBalance


class RecordBalance(_Command, frozen=True):
    """What balance found, where that is something new; a change that it proposes is only advice unless a `RecordRole`
    follows."""

    balanced: Balanced


class RecordPair(_Command, frozen=True):
    """How two workers stand to each other has changed, and why. `is_slow`: what the canary moved came slower than the floor."""

    prefill: str
    decode: str
    state: PairState
    why: str = ""
    bytes_per_s: float | None = None
    is_slow: bool = False


Command = (
    RecordDecision
    | SendPrefill
    | SendDecode
    | SendWhole
    | CancelLeg
    | BreakLeg
    | ReleaseHandle
    | FailRequest
    | RelayFailure
    | ProbeWorker
    | ProveHandoff
    | RecordRole
    | RecordBalance
    | RecordPair
)
