"""Asks an engine for a page of its own: with its key, within bounds, and never elsewhere than where it listens."""

import os
from collections.abc import Mapping
from enum import StrEnum

import aiohttp

from twinpool.errors import TwinpoolError
from twinpool.http1.urls import redirection

MAX_PAGE_BYTES = 8 << 20  # vLLM's metrics take 0.2 MB; nothing that an engine says may fill our memory

_ABSENT = frozenset({403, 404, 405, 501})
"""403 too: what stands before an engine may forbid every page that it does not know. A key that is wrong is a 401."""


class Trouble(StrEnum):
    """Why an engine is not known to be well."""

    UNREACHABLE = "unreachable"
    SILENT = "silent"
    AUTH = "auth"  # it does not take our key
    STRANGE = "strange"  # it answers, and not as an engine does


class ProbeError(TwinpoolError):
    """Why an engine is not known to be well, in words and as one of a few reasons."""

    def __init__(self, message: str, trouble: Trouble = Trouble.STRANGE) -> None:
        super().__init__(message)
        self.trouble = trouble


async def fetch(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> bytes | None:
    """The page; None where there is no such page. Raises `ProbeError` for every other answer, and for none. A redirection is
    not followed: what it names is not where the configuration says that the engine is, and must not get its key."""
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status in _ABSENT:
                return None
            if answer.status == 401:
                raise _refusal(headers)
            if answer.status != 200:
                leads_to = redirection(answer.status, url, answer.headers.get("location"))
                raise ProbeError(f"{url} answered {answer.status}{f' and leads to {leads_to}' if leads_to else ''}")
            page = await answer.content.read(MAX_PAGE_BYTES + 1)
            while len(page) <= MAX_PAGE_BYTES and (more := await answer.content.read(MAX_PAGE_BYTES + 1)):
                page += more
    except aiohttp.ClientConnectorError as lost:
        raise ProbeError(f"no connection: {_reason(lost.os_error)}", Trouble.UNREACHABLE) from lost
    except (aiohttp.ClientError, OSError) as lost:
        raise ProbeError(str(lost) or type(lost).__name__, Trouble.SILENT) from lost
    if len(page) > MAX_PAGE_BYTES:
        raise ProbeError(f"{url} answers with more than {MAX_PAGE_BYTES >> 20} MB")
    return page


def _refusal(headers: Mapping[str, str]) -> ProbeError:
    """It does not take our key, or wants one."""
    key = "the key that it was sent" if "authorization" in headers else "a request without a key: api_key_file"
    return ProbeError(f"it refuses {key} (401)", Trouble.AUTH)


def _reason(problem: OSError) -> str:
    """The system's own words: the library's name the address once more. Name look-ups have numbers of their own."""
    number = problem.errno or 0
    return os.strerror(number) if number > 0 else problem.strerror or str(problem)
