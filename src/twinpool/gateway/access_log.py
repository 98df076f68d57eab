"""The access log: one JSON line a request, when it has ended. No prompt, no answer, no key and no handle is in it."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from twinpool.config import Kept
from twinpool.core.model import Usage
from twinpool.gateway.calls import ClientRequest
from twinpool.gateway.lines import LineWriter
from twinpool.measure.timeline import Timeline


class _Line(msgspec.Struct, omit_defaults=True):
    at: datetime
    request: str
    x_request_id: str
    model: str
    endpoint: str
    stream: bool
    path: str
    outcome: str
    attempts: int
    e2e_s: float
    prefill: str = ""
    decode: str = ""
    ttft_s: float | None = None
    ttft_part_s: dict[str, float] = {}
    worst_gap_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class AccessLog:
    """Appends to its file until that is full, then begins another."""

    def __init__(self, path: Path, kept: Kept) -> None:
        self._max_bytes = kept.max_bytes
        self._lines = LineWriter(path, "access log", appends=True, keep=kept.keep)
        self._encoder = msgspec.json.Encoder()

    def write(self, request: ClientRequest, outcome: str, timeline: Timeline, usage: Usage | None) -> None:
        line = _Line(
            at=datetime.now(UTC),
            request=request.id,
            x_request_id=request.wire_id.decode(),
            model=request.call.facts.model,
            endpoint=request.call.facts.endpoint,
            stream=request.call.facts.stream,
            path=request.path,
            outcome=outcome,
            attempts=request.attempt,
            e2e_s=_rounded(timeline.e2e_s),
            prefill=request.prefill,
            decode=request.decode,
            ttft_s=None if timeline.ttft_s is None else _rounded(timeline.ttft_s),
            ttft_part_s={part: _rounded(seconds) for part, seconds in timeline.ttft_parts_s().items()},
            worst_gap_s=None if request.gaps is None else _rounded(request.gaps.worst_s),
            prompt_tokens=request.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
        )
        self._lines.write(self._encoder.encode(line) + b"\n")
        if self._lines.size > self._max_bytes:
            self._lines.turn_over()

    def close(self) -> None:
        self._lines.close()


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
