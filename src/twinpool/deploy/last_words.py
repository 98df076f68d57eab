"""Why a process did not start, from what it wrote: one line for a person. Pure.

An engine of several processes ends in a traceback of a traceback, whose last line says the least: "Engine core initialization
failed. See root cause above."
"""

import re
from collections.abc import Sequence

TAIL_LINES = 15  # what a person reads before opening the log

_EXCEPTION = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (\S.*)$")
_WRAPPERS = ("Engine core initialization failed", "Engine process failed to start", "Failed core proc")
_OURS = "twinpool: "


def reason(lines: Sequence[str]) -> str:
    """The first exception that only repeats no other, else the last line that is not empty. Empty when nothing was written."""
    spoken = [line.strip() for line in lines if line.strip()]
    if not spoken or spoken[-1].startswith(_OURS):
        return spoken[-1].removeprefix(_OURS) if spoken else ""
    found = [match for line in spoken if (match := _EXCEPTION.search(line)) and not match[2].startswith(_WRAPPERS)]
    return f"{found[0][1]}: {found[0][2]}" if found else spoken[-1]
