"""Traffic that was recorded, line by line: an iterator of lines in, an iterator of requests out, nothing kept.

- Azure LLM inference traces (AzurePublicDataset, CC-BY): CSV of TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake traces (kvcache-ai/Mooncake, Apache-2.0): JSON lines of timestamp in ms, input_length, output_length, hash_ids.

Both count from their first request. A line that is not what it should be raises a `UserError` that names it.
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated

import msgspec

from twinpool.errors import UserError
from twinpool.workload.offered import LONG_PROMPT_TOKENS, Offered

_AZURE_HEAD = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOST_TOKENS = 1_000_000_000
"""Of a prompt or an answer: no engine's context is near it, and beyond it a line is broken."""


def trace(lines: Iterable[str], *, long_prompt_tokens: int = LONG_PROMPT_TOKENS) -> Iterator[Offered]:
    """Of whichever kind the first line shows. Requests with an empty prompt or answer are asked for one token."""
    lines = iter(lines)
    if (head := next(lines, None)) is None:
        raise UserError("the trace is empty")
    first = head.strip().removeprefix("\ufeff")
    if first.startswith("{"):
        rows = _parsed(chain([first], lines), _mooncake, first_number=1)
    elif tuple(first.split(",")[:3]) == _AZURE_HEAD:
        rows = _parsed(lines, _azure, first_number=2)
    elif not first:
        raise UserError("the first line of the trace is empty")
    else:
        raise UserError(f"not a trace: its first line is neither {','.join(_AZURE_HEAD)} (Azure) nor a JSON object (Mooncake)")
    began_s, last_s = None, 0.0
    for number, (clock_s, prompt_tokens, output_tokens, prefix) in rows:
        began_s = clock_s if began_s is None else began_s
        at_s = clock_s - began_s
        if at_s < last_s:
            raise UserError(f"line {number} of the trace is earlier than the one before: sort it by time")
        last_s = at_s
        yield Offered(at_s, max(1, prompt_tokens), max(1, output_tokens), prompt_tokens > long_prompt_tokens, prefix)
    if began_s is None:
        raise UserError("the trace has no request")


_Row = tuple[float, int, int, tuple[int, ...]]  # seconds on the trace's clock, prompt, answer, blocks


def _parsed(lines: Iterable[str], parse: Callable[[str], _Row], *, first_number: int) -> Iterator[tuple[int, _Row]]:
    for number, line in enumerate(lines, first_number):
        if text := line.strip():
            try:
                yield number, parse(text)
            except (ValueError, msgspec.DecodeError) as wrong:
                raise UserError(f"line {number} of the trace: {wrong}") from wrong


def _azure(line: str) -> _Row:
    cells = line.split(",")
    if len(cells) < len(_AZURE_HEAD):
        raise ValueError(f"{line!r} has {len(cells)} of the columns {','.join(_AZURE_HEAD)}")
    try:
        clock_s = _seconds(datetime.fromisoformat(cells[0]))
    except ValueError:
        raise ValueError(f"{cells[0]!r} is no time: 2023-11-16 18:15:46.68 is one") from None
    return clock_s, _tokens(cells[1]), _tokens(cells[2]), ()


def _tokens(cell: str) -> int:
    try:
        tokens = int(cell)
    except ValueError:
        raise ValueError(f"{cell[:40]!r} is no number of tokens") from None
    if tokens < 0:
        raise ValueError(f"{cell[:40]} tokens are less than none")
    if tokens > _MOST_TOKENS:
        raise ValueError(f"{cell[:40]} tokens are more than any engine takes")
    return tokens


def _seconds(stamp: datetime) -> float:
    """On a clock whose zero is nobody's business. Where no zone is named it is one and the same."""
    return (stamp.replace(tzinfo=stamp.tzinfo or UTC) - datetime(2020, 1, 1, tzinfo=UTC)).total_seconds()


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[int, ...] = ()


_decode_mooncake = msgspec.json.Decoder(_Mooncake).decode


def _mooncake(line: str) -> _Row:
    row = _decode_mooncake(line)
    return row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids
