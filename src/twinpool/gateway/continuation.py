"""Going on with a stream whose engine died: what the client was sent, and how another engine's answer is joined to it.

    client ◄── events of the first engine ──┤ died ├── events of the second, from where the first stopped
                     └──► SentCopy                        ids made the first's, no second role, usage of the whole

While a stream runs well its bytes are only copied, up to a bound. They are parsed once, when it broke. The second engine gets
the client's own body and the text that was sent; it writes that text again for itself and streams what comes after it. An
answer that cannot be gone on with rightly (tools, reasoning, log-probabilities, several choices, a copy that outgrew its bound)
ends with an error event instead.
"""

from typing import Any

import msgspec

_MAX_COPY_BYTES = 1 << 20  # about 4,000 tokens, at 250 bytes an event


class SentCopy:
    """The events that went to the client, as bytes. `is_whole` is False once there were more than are kept."""

    __slots__ = ("is_whole", "raw")

    def __init__(self) -> None:
        self.raw = bytearray()
        self.is_whole = True

    def add(self, data: bytes) -> None:
        if self.is_whole:
            self.raw += data
            if len(self.raw) > _MAX_COPY_BYTES:
                self.is_whole = False
                self.raw.clear()


class Sent(msgspec.Struct, frozen=True):
    """What a client has of an answer: its text, and what every event of it must go on to say."""

    text: str
    id: str
    created: int


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str = ""
    finish_reason: str | None = None
    logprobs: Any = None


class _Event(msgspec.Struct):
    id: str
    created: int
    choices: list[_Choice]


_EVENT = msgspec.json.Decoder(_Event)


def read_sent(copy: SentCopy) -> Sent | None:
    """What the copy amounts to; None where the answer cannot be gone on with: it is not whole, has ended, or has more in it
    than the text of one choice."""
    if not copy.is_whole:
        return None
    texts: list[str] = []
    first: _Event | None = None
    for line in bytes(copy.raw).splitlines():
        if not line.startswith(b"data:"):
            continue
        try:
            event = _EVENT.decode(line[5:])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        first = first or event
        for choice in event.choices:
            if choice.index or choice.finish_reason is not None or choice.logprobs is not None:
                return None
            texts.append(choice.text if choice.delta is None else choice.delta.content or "")
    return None if first is None else Sent("".join(texts), first.id, first.created)


def join_event(line: bytes, sent: Sent) -> bytes | None:
    """One line of the second engine's stream as the client must see it; None for what it has already: the role."""
    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
        return line
    try:
        event = msgspec.json.decode(line[5:])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return line
    if not isinstance(event, dict) or not isinstance(choices := event.get("choices"), list):
        return line
    deltas = [choice["delta"] for choice in choices if isinstance(choice, dict) and isinstance(choice.get("delta"), dict)]
    if any(delta.pop("role", None) for delta in deltas) and not any(delta.get("content") for delta in deltas):
        return None
    event["id"], event["created"] = sent.id, sent.created
    return b"data: " + msgspec.json.encode(event)
