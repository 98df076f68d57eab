"""Server-sent events of an OpenAI stream: which one carries the first token, and how the stream ended.

Only the beginning and the end of a stream are ever parsed. What lies between is passed on as it comes.
"""

import enum
from typing import Any

import msgspec

from twinpool.engines.answers import BAD_ENDS, Ending, read_ending

DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


class _Error(msgspec.Struct):
    code: int | str | None = None


class _Failed(msgspec.Struct):
    error: _Error


_EVENT = msgspec.json.Decoder(_Event)


class Opening(enum.Enum):
    """What the beginning of a stream amounts to so far."""

    NOTHING = "nothing"  # no token yet: comments, the role, empty text
    CONTENT = "content"
    ERROR = "error"


def read_opening(data: bytes) -> tuple[Opening, int]:
    """Look through the whole events at the start of `data`; also says how many bytes need not be looked at again."""
    seen = 0
    while (end := _end_of_event(data, seen)) > 0:
        for line in data[seen:end].splitlines():
            if line.startswith((b"data:", b"error:")):
                opening = _opening_of(line)
                if opening is not Opening.NOTHING:
                    return opening, end
        seen = end
    return Opening.NOTHING, seen


def read_error(data: bytes) -> tuple[int, bytes]:
    """The error that an engine put into the beginning of a stream, as an answer: its status (502 where its code is none) and
    its JSON body."""
    for line in data.splitlines():
        mark, _, payload = line.partition(b":")
        if mark not in (b"data", b"error"):
            continue
        body = payload.strip() if mark == b"data" else b'{"error":%b}' % payload.strip()
        try:
            code = msgspec.json.decode(body, type=_Failed).error.code
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        return (code if isinstance(code, int) and 400 <= code < 600 else 502), body
    return 502, b'{"error":{"message":"the engine failed","type":"upstream_error","param":null,"code":"upstream_failed"}}'


def read_closing(tail: bytes) -> tuple[bool, Ending]:
    """From the last bytes of a stream: whether it ended as a stream must, with `[DONE]` and no bad finish reason, and the
    usage where the engine told it."""
    ending = Ending()
    for line in tail.splitlines():
        if not line.startswith(b"data:"):
            continue
        found = read_ending(line[5:])
        if found is not None:
            ending = Ending(
                usage=found.usage if found.tells_usage else ending.usage,
                choices=found.choices or ending.choices,
                timings=found.timings if bytes(found.timings) != b"null" else ending.timings,
            )
    return DONE in tail[-32:] and not ending.is_failure, ending


def _end_of_event(data: bytes, start: int) -> int:
    """Where the event that begins at `start` ends, behind its blank line; 0 while it is not whole."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := data.find(mark, start)) >= 0]
    return min(ends, default=0)


def _opening_of(line: bytes) -> Opening:
    if line.startswith(b"error:"):
        return Opening.ERROR
    payload = line[5:].strip()
    if payload == DONE:
        return Opening.NOTHING
    try:
        event = _EVENT.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Opening.CONTENT  # a shape that we do not know is the client's to judge
    if event.error is not None:
        return Opening.ERROR
    if any(choice.finish_reason in BAD_ENDS for choice in event.choices):
        return Opening.ERROR
    return Opening.CONTENT if any(_has_content(choice) for choice in event.choices) else Opening.NOTHING


def _has_content(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls or delta.refusal)
