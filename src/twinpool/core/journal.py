"""The journal's format: JSON lines, first who wrote it under which rules, then each event with the commands it led to.

    {"version":"0.1.0","rules":{"prefill_window_tokens":2048,...}}
    {"event":{"type":"RequestArrived","at":12.5,...},"commands":[{"type":"RecordDecision",...},{"type":"SendPrefill",...}]}

A file that goes on where another ended begins with what its controller knew, so that each replays on its own:

    {"version":"0.1.0","rules":{...},"snapshot":{"is_draining":false,...}}

Text in, records out, and back; `gateway` writes files of it, `twinpool.assemble.replay` feeds them to a fresh controller. A
crash may cut the last line short, which is no error; any other broken line is.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from twinpool import __version__
from twinpool.config import Routing
from twinpool.core.commands import Command
from twinpool.core.events import Event
from twinpool.core.law import Law
from twinpool.errors import UserError


class Header(msgspec.Struct, frozen=True):
    """The first line: the Twinpool that wrote it, the rules and the law its controller had, and the `Controller.remember` of
    one that was not fresh."""

    version: str
    rules: Routing
    law: Law = Law()
    snapshot: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Step(msgspec.Struct, frozen=True):
    """One line: what happened, and what was commanded then."""

    event: Event
    commands: tuple[Command, ...]


class Cut(msgspec.Struct, frozen=True):
    """Stands for a last line that a crash cut short."""


class _Version(msgspec.Struct):
    version: str


_ENCODER = msgspec.json.Encoder()
_STEPS = msgspec.json.Decoder(Step)


def encode_header(header: Header) -> bytes:
    """The first line, its end included."""
    return _ENCODER.encode(header) + b"\n"


def encode_step(event: Event, commands: Sequence[Command]) -> bytes:
    """One line, its end included."""
    return _ENCODER.encode({"event": event, "commands": commands}) + b"\n"


def decode_header(line: bytes) -> Header:
    """Raises `UserError` where the line is no header, or one of another version: that one's decisions may differ."""
    try:
        version = msgspec.json.decode(line, type=_Version).version
        if version == __version__:
            return msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
        raise UserError(f"this is not a journal: its first line is no header ({wrong})") from wrong
    raise UserError(f"the journal was written by Twinpool {version}, this is {__version__}: replay it with {version}")


def decode_steps(lines: Iterable[bytes], first_line: int = 2) -> Iterator[tuple[int, Step | Cut]]:
    """The steps with the numbers of their lines; the lines come with their ends, as a file gives them.

    A broken last line without its end yields a `Cut`; any other broken line raises `UserError`.
    """
    for number, line in enumerate(lines, first_line):
        try:
            yield number, _STEPS.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
            if line.endswith(b"\n"):
                raise UserError(f"line {number} of the journal is broken: {wrong}") from wrong
            yield number, Cut()
