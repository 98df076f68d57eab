"""An engine that follows a script: what Twinpool is tested against, without a model.

    script.py    what a test sets: timing, faults, replies          ledger.py   KV handles: held ─► consumed, released, expired
    engine.py    listens, records, restarts, dies                   serving.py  one request, from its body to its last byte
    request.py   what a body asks for, and vLLM's objections to it  answers.py  which words, and how they look on the wire
    metrics.py   Prometheus text                                    __main__.py the same as a process of its own
    remote.py    the script over HTTP

By default it is a sane OpenAI engine, whose every word tells whose answer it is: to a prompt ending in `n17` it says
`n17.0#<checksum of the prompt> n17.1 n17.2 …`, so that a swapped, doubled, stale or garbled answer shows. One word is one
token. It takes either side of a handoff as vLLM's NIXL connector does, and the decode side says what the pulled KV makes it
say: a handle that was spent, has expired or never was gives HTTP 200 and garbage, as it does with real engines.

    async with ScriptedEngine() as prefill, ScriptedEngine(Script(token_interval_s=0.01)) as decode: ...
"""

from twinpool.engines.scripted.answers import GARBAGE, answer_text
from twinpool.engines.scripted.engine import ScriptedEngine
from twinpool.engines.scripted.ledger import HandleState, Ledger
from twinpool.engines.scripted.script import Default, End, Recorded, Reply, Script

__all__ = [
    "GARBAGE",
    "Default",
    "End",
    "HandleState",
    "Ledger",
    "Recorded",
    "Reply",
    "Script",
    "ScriptedEngine",
    "answer_text",
]
