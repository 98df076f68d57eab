"""What engines count, and what a client sees of it.

Every stream is asked for its usage, so that costs are learnt from all traffic; the event that has it, and nothing but it, is
taken out again where the client did not ask. Other engines are not asked: there the relay counts events.

A decode worker that was handed its KV counts all of it as cached. What the client may know is how much of its prompt the
prefill worker had in its own cache; so that number takes the other's place, in each event that has one.
"""

import re
from collections.abc import Callable

import msgspec

from twinpool.core.model import WorkerFacts
from twinpool.engines.identity import Kind
from twinpool.handoff.body import Fields, put_together

_CACHED = re.compile(rb'(?<!\\)("cached_tokens"\s*:\s*)\d+')
_NO_CHOICES = re.compile(rb'(?<!\\)"choices"\s*:\s*\[\s*\]')
_EVENT = re.compile(rb".*?\r?\n\r?\n", re.DOTALL)

_KNOW_THE_WISH = frozenset({Kind.EMBEDDED, Kind.VLLM, Kind.SGLANG})
"""llama.cpp's server does too, but it would move what it tells unasked (`timings`) into the event that is taken out; that tells
as much."""

_ASK = msgspec.Raw(b'{"include_usage":true}')
_OPTIONS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_UNSET = (b"null", b"false")


class _Counted(msgspec.Struct):
    usage: dict[str, msgspec.Raw]
    choices: list[msgspec.Raw]


_COUNTED = msgspec.json.Decoder(_Counted)


def prefill_cached(cached_tokens: int) -> Callable[[bytes], bytes]:
    """A mend for the answers of a decode leg whose prompt was prefilled with so many tokens cached."""
    ours = b"\\g<1>%d" % cached_tokens

    def mend(data: bytes) -> bytes:
        return _CACHED.sub(ours, data) if b'"cached_tokens"' in data else data

    return mend


def knows_the_wish(facts: WorkerFacts) -> bool:
    """Whether this engine takes `stream_options` and changes nothing else for it, as far as its kind tells."""
    return facts.kind in _KNOW_THE_WISH


def asking_for_usage(fields: Fields) -> Fields | None:
    """The body of a stream with the wish for its usage; None where the client has it already, or wants something with which
    the wish would change more than one event, or what is for the engine to refuse."""
    try:
        options = _OPTIONS.decode(fields.get("stream_options", b"null"))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not options:
        return {**fields, "stream_options": _ASK}
    if bytes(options.get("include_usage", b"null")) not in _UNSET or "continuous_usage_stats" in options:
        return None
    return {**fields, "stream_options": msgspec.Raw(put_together({**options, "include_usage": b"true"}))}


def without_usage(events: bytes) -> bytes:
    """Whole events but for the one that tells the usage and nothing else; byte for byte the same where there is none."""
    if b'"usage"' not in events or _NO_CHOICES.search(events) is None:
        return events
    kept = []
    end = 0
    for event in _EVENT.finditer(events):
        end = event.end()
        if not _is_usage_alone(event[0]):
            kept.append(event[0])
    return b"".join(kept) + events[end:]


def _is_usage_alone(event: bytes) -> bool:
    lines = event.splitlines()
    if not lines or not lines[0].startswith(b"data:") or any(lines[1:]):
        return False
    try:
        return not _COUNTED.decode(lines[0][5:]).choices
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
