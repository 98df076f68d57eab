"""All that a controller knows at one moment, as one JSON object: a journal's file can begin with it in place of the events
that led there.

    {"is_draining":false,"wakeup":612.5,"cluster":{"workers":[...],"loads":[...]},"requests":[...],"waiting":[...],...}

The controller's records are structs, so they are their own description: taken down as they stand and read back as new ones. It
is text at once and never kept as records, which the controller would go on to change.
"""

import msgspec

from twinpool.core.cluster import ClusterRecord
from twinpool.core.decisions import Balanced
from twinpool.core.handles import Handle
from twinpool.core.pairs import PairsRecord
from twinpool.core.requests import Request
from twinpool.core.waiting import WaitingRecord
from twinpool.errors import UserError


class BalanceRecord(msgspec.Struct, eq=False):
    """Where balance stands; `next_tick` is None while nothing is asked for."""

    next_tick: float | None = None
    asked_at: float = 0.0
    changed_at: float = -1e9
    last: Balanced | None = None


class Snapshot(msgspec.Struct, frozen=True):
    """Each list in the order in which the controller goes through it."""

    is_draining: bool
    wakeup: float | None
    cluster: ClusterRecord
    requests: list[Request]
    waiting: WaitingRecord
    handles: list[Handle]
    pairs: PairsRecord
    balance: BalanceRecord
    learnt: msgspec.Raw
    prompt_lengths: dict[str, float]


_ENCODER = msgspec.json.Encoder(order="deterministic")  # a set of ids would come in the order of their hashes
_DECODER = msgspec.json.Decoder(Snapshot)


def encode_snapshot(snapshot: Snapshot) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(snapshot))


def decode_snapshot(text: msgspec.Raw) -> Snapshot:
    """New records, for one controller to go on with. Raises `UserError` where the text is no snapshot of this version."""
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise UserError(f"the journal's snapshot is broken: {wrong}") from wrong
