"""Whether an engine has lost KV: blocks that stay in use while nothing runs there and nobody holds a handle.

Seen on decode engines whose load was aborted at the wrong moment; what is lost stays lost until a restart, and the engine has
less and less room. One look says nothing: a finished request's blocks go a step later, a held handle's with its lease.
"""

_IDLE_RATIO = 0.01  # rounding, and what an engine keeps for itself
_LOOKS = 5


class LeakWatch:
    """The looks at one engine. Times are seconds on any one clock."""

    def __init__(self, settle_s: float) -> None:
        """`settle_s`: how long at least the engine must have been idle; longer than a lease."""
        self._settle_s = settle_s
        self._since: float | None = None
        self._looks = 0

    def look(self, at: float, *, is_idle: bool, kv_usage_ratio: float | None) -> bool:
        """Whether a leak is to be suspected now. `is_idle`: nothing runs or waits there, as the engine and as we count."""
        if not is_idle or kv_usage_ratio is None or kv_usage_ratio <= _IDLE_RATIO:
            self._since, self._looks = None, 0
            return False
        self._since = at if self._since is None else self._since
        self._looks += 1
        return self._looks >= _LOOKS and at - self._since >= self._settle_s
