"""Waits for something to become true; a test names what, and until when."""

import time
from collections.abc import Callable

BETWEEN_LOOKS_S = 0.02  # each look is a scrape of a process that shares our cores


def until(what: Callable[[], bool], *, within_s: float, story: Callable[[], object] = str) -> float:
    """How many seconds it took. Fails the test, with the `story`, when it did not come true in time."""
    began = time.monotonic()
    while not what():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what.__qualname__} {story()}")
        time.sleep(BETWEEN_LOOKS_S)
    return time.monotonic() - began
