"""When a worker that ended is started again: at once after a good run, ever later while it keeps failing.

Pure: how long it ran is an argument.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Seconds, and how often a worker that was never ready may fail before the whole start is called off."""

    first_delay_s: float = 0.5  # a crash is seldom cured by trying again in the same instant
    longest_delay_s: float = 30.0  # what is broken for long costs a core's second of start-up each time
    well_after_s: float = 60.0  # it ran well: what ended it now is another matter
    start_tries: int = 3


class Restarts:
    """One worker's record."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._was_ready = False

    def delay_after(self, *, ready: bool, ran_s: float) -> float | None:
        """Seconds to wait before the next start, or None when it never came up and never will.

        `ready` says whether the run that has just ended got as far as serving, `ran_s` for how long it then served.
        """
        self._was_ready |= ready
        if ready and ran_s >= self._policy.well_after_s:
            self._failures = 0
        self._failures += 1
        if not self._was_ready and self._failures >= self._policy.start_tries:
            return None
        doubled = self._policy.first_delay_s * 2.0 ** min(self._failures - 1, 32)
        return min(doubled, self._policy.longest_delay_s)
