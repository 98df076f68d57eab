"""Whose `cached_tokens` a client sees.

A decode worker that was handed its KV counts all of it as cached. What the client may know is how much of its prompt the
prefill worker had in its own cache; so that number takes the other's place, in each event that has one.
"""

import re
from collections.abc import Callable

_CACHED = re.compile(rb'(?<!\\)("cached_tokens"\s*:\s*)\d+')


def prefill_cached(cached_tokens: int) -> Callable[[bytes], bytes]:
    """A mend for the answers of a decode leg whose prompt was prefilled with so many tokens cached."""
    ours = b"\\g<1>%d" % cached_tokens

    def mend(data: bytes) -> bytes:
        return _CACHED.sub(ours, data) if b'"cached_tokens"' in data else data

    return mend
