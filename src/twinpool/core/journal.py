"""The journal's format: a header line, then one line an event with the commands that it brought about. Text in, text out."""

import msgspec

from twinpool.config import Routing
from twinpool.core.commands import Command
from twinpool.core.events import Event


class Header(msgspec.Struct, frozen=True):
    """What a replay needs to build the same controller."""

    version: str
    rules: Routing


class Step(msgspec.Struct, frozen=True):
    event: Event
    commands: list[Command]


_ENCODER = msgspec.json.Encoder()


def encode_header(header: Header) -> bytes:
    return _ENCODER.encode(header) + b"\n"


def encode_step(event: Event, commands: list[Command]) -> bytes:
    return _ENCODER.encode(Step(event, commands)) + b"\n"
