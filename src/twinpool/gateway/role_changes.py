"""Which workers changed pool, when and why: the last of them, whoever wanted it."""

from collections import deque
from time import monotonic
from typing import Any

from twinpool.core.commands import RecordRole
from twinpool.gateway.balance_state import BECAUSE

_KEPT = 100


class RoleChanges:
    """Told by the driver."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, float, RecordRole]] = deque(maxlen=_KEPT)
        self._count = 0

    def changed(self, at: float, change: RecordRole) -> None:
        """`at` is on `time.monotonic`."""
        self._count += 1
        self._kept.append((self._count, at, change))

    def recent(self, count: int) -> list[dict[str, Any]]:
        """The oldest first; `number` counts them."""
        now = monotonic()
        return [
            {
                "number": number,
                "age_s": round(now - at, 3),
                "worker": change.worker,
                "role": str(change.role),
                "why": str(change.reason),
                "words": _words(change),
            }
            for number, at, change in list(self._kept)[-count:]
        ]


def _words(change: RecordRole) -> str:
    return f"{change.worker} moved to {change.role}, because {BECAUSE[change.reason]}"
