"""What leaves a command as text, for people and for programs.

Much of it was written by strangers: a model's name, an engine's answer, a file. It commands no terminal: what cannot be seen is
left out here (and in `terminal`, which uses this), whoever wrote it, so nobody else needs to think of it.
"""

import json
from typing import Any

import click


def printable(text: str) -> str:
    """Without what is obeyed and not shown: escape sequences, other control characters, marks that turn the direction of
    writing. Lines stay lines."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter == "\n" else " " * letter.isspace() for letter in text)


def echo(text: str, *, err: bool = False) -> None:
    click.echo(printable(text), err=err)


def json_text(value: Any) -> str:
    """In one line of ASCII that every reader of JSON takes; a number that JSON does not have is null."""
    import msgspec  # only now: help needs none of it

    return json.dumps(msgspec.json.decode(msgspec.json.encode(value)), allow_nan=False)
