"""The script from afar, for an engine that is a process of its own; and SGLang's abort.

    POST /script         {"token_interval_s": 0.01, "poisoned_peers": ["127.0.0.1:9001"], "replies": [REPLY, …]}
    POST /abort_request  {"rid": "req-1"}: every request whose `rid` begins so; `req-10` goes, too, as it does there
    GET  /recorded       what was asked

A REPLY has the names of `script.Reply` or `script.Default`, with text for bytes and an object for headers; a `body` that is
not text is sent as JSON. One with `status`, `body` or `chunks` is a Reply.
"""

from collections import deque
from typing import Any, get_type_hints

import msgspec

from twinpool.engines.scripted.script import Default, Reply, Script


class OrderError(ValueError):
    """An order that makes no sense; the text says why."""


def change(script: Script, order: Any) -> None:
    """Set what the object says, all of it or nothing. Raises OrderError."""
    types = get_type_hints(Script)
    if not isinstance(order, dict) or order.keys() - types.keys():
        raise OrderError(f"a script is an object with some of the keys {', '.join(sorted(types))}")
    try:
        values = {
            name: deque(map(_reply, value)) if name == "replies" else msgspec.convert(value, types[name])
            for name, value in order.items()
        }
    except (AttributeError, TypeError, ValueError) as error:  # msgspec's ValidationError is a ValueError
        raise OrderError(str(error)) from error
    for name, value in values.items():
        setattr(script, name, value)


def _reply(order: dict[str, Any]) -> Reply | Default:
    if not order.keys() & {"status", "body", "chunks"}:
        return msgspec.convert(order, Default)
    fields = dict(order)
    if "headers" in fields:
        fields["headers"] = tuple((name.lower().encode(), value.encode()) for name, value in fields["headers"].items())
    if "body" in fields:
        body = fields["body"]
        fields["body"] = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
    if "chunks" in fields:
        fields["chunks"] = tuple((float(delay_s), chunk.encode()) for delay_s, chunk in fields["chunks"])
    return msgspec.convert(fields, Reply, builtin_types=(bytes,))
