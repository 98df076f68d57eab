"""The ledger of the KV that this worker holds for others: which handle is good, and for how long.

    held ──claim────► spent       exactly once; the decode worker has the KV or is reading it
      ├───release───► released    the gateway no longer wants it
      └───lease ends► expired     nobody came

The ledger is the one authority, by the clock of the worker that holds the KV. It is pure: time is an argument, files
are the caller's. What has ended is remembered for a while, so that a second try is told what happened rather than
"unknown".
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from twinpool.errors import HandleError, Reason

_REMEMBERED = 8192  # ends; at 100 handles a second more than a minute, in under 2 MB


@dataclass(frozen=True, slots=True)
class Held:
    handle_id: str
    signature: str
    file_name: str
    kv_bytes: int
    expires_at: float


class HandleLedger:
    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.ends: Counter[str] = Counter()
        self._held: OrderedDict[str, Held] = OrderedDict()  # in order of expiry: every lease is as long
        self._ended: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def held_bytes(self) -> int:
        return sum(held.kv_bytes for held in self._held.values())

    def hold(self, handle_id: str, signature: str, file_name: str, kv_bytes: int, now: float) -> Held:
        """From now on the handle is good, once, until ``now + lease_s``."""
        if handle_id in self._held or handle_id in self._ended:
            raise ValueError(f"handle {handle_id} exists")
        held = Held(handle_id, signature, file_name, kv_bytes, now + self.lease_s)
        self._held[handle_id] = held
        return held

    def claim(self, handle_id: str, now: float) -> Held:
        """Spends the handle. Raises `HandleError` if it must not be."""
        held = self._good(handle_id, now)
        self._end(held, "spent")
        return held

    def release(self, handle_id: str, now: float) -> Held | None:
        """Frees the handle; None if it was released before (asking twice is no error). Raises `HandleError`
        otherwise."""
        if self._ended.get(handle_id) == "released":
            return None
        held = self._good(handle_id, now)
        self._end(held, "released")
        return held

    def signature_of(self, handle_id: str) -> str | None:
        held = self._held.get(handle_id)
        return held.signature if held else None

    def expire(self, now: float) -> list[Held]:
        """Ends every lease that is over, and says whose KV can go."""
        over = [held for held in self._held.values() if held.expires_at <= now]
        for held in over:
            self._end(held, "expired")
        return over

    def next_expiry(self) -> float | None:
        first = next(iter(self._held.values()), None)
        return first.expires_at if first else None

    def _good(self, handle_id: str, now: float) -> Held:
        held = self._held.get(handle_id)
        if held is not None and now < held.expires_at:
            return held
        how = "expired" if held is not None else self._ended.get(handle_id)
        if how == "spent":
            raise HandleError("this KV handle was spent: a second decode needs a new prefill", Reason.HANDLE_SPENT)
        if how == "expired":
            raise HandleError(f"this KV handle's lease of {self.lease_s:g} s is over: prefill again", Reason.HANDLE_EXPIRED)
        if how == "released":
            raise HandleError("this KV handle was released: prefill again", Reason.HANDLE_EXPIRED)
        raise HandleError("this worker holds no such KV handle (or has restarted since)", Reason.HANDLE_UNKNOWN)

    def _end(self, held: Held, how: str) -> None:
        del self._held[held.handle_id]
        self._ended[held.handle_id] = how
        self.ends[how] += 1
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
