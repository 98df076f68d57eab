"""Services to measure: the scripted engine, told what to say and when."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from random import Random
from time import monotonic
from typing import Any

from twinpool.bench.prepare import Prepared, prepare
from twinpool.bench.run import Measured, offer
from twinpool.bench.target import target_of
from twinpool.config import Objectives
from twinpool.engines.scripted import Recorded, Reply, ScriptedEngine
from twinpool.http1 import Pool
from twinpool.measure.blocks import Window
from twinpool.measure.sample import Sample
from twinpool.workload.arrivals import Constant
from twinpool.workload.lengths import Exactly
from twinpool.workload.mixes import Mix, Part
from twinpool.workload.offered import Offered, offered

EVENTS = ((b"content-type", b"text/event-stream"),)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str = "word ") -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def end(prompt_tokens: int = 10, completion_tokens: int = 3, reason: str = "stop", cached: int = 0) -> list[bytes]:
    """How a whole stream ends."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return [
        event(choices=[{"index": 0, "delta": {}, "finish_reason": reason}]),
        event(choices=[], usage=usage),
        b"data: [DONE]\n\n",
    ]


def prompt_of(recorded: Recorded) -> str:
    body = recorded.body
    return str(body["messages"][0]["content"] if "messages" in body else body["prompt"])


def stream(chunks: Iterable[tuple[float, bytes]]) -> Reply:
    return Reply(headers=EVENTS, chunks=chunks)


def told(tokens: int, *, first_s: float = 0.0, then_s: float = 0.0, prompt_tokens: int = 10) -> Reply:
    """One token an event."""
    chunks = [(first_s if index == 0 else then_s, token()) for index in range(tokens)]
    return stream([*chunks, *((0.0, one) for one in end(prompt_tokens, tokens))])


class Stamped:
    """A stream that notes when each of its tokens went out: the truth, on the client's own clock."""

    def __init__(self, tokens: int, *, first_s: float, then_s: float, prompt_tokens: int) -> None:
        self.written: list[float] = []
        self._tokens, self._first_s, self._then_s, self._prompt_tokens = tokens, first_s, then_s, prompt_tokens

    def chunks(self) -> Iterator[tuple[float, bytes]]:
        for index in range(self._tokens):
            yield (self._then_s if index else self._first_s), token()
            self.written.append(monotonic())  # asked for more: the one before is out
        for one in end(self._prompt_tokens, self._tokens):
            yield 0.0, one


def evenly(rate: float, duration_s: float, *, prompt_tokens: int = 40, output_tokens: int = 4) -> list[Offered]:
    mix = Mix(parts=(Part(share=1, prompt=Exactly(prompt_tokens), output=Exactly(output_tokens)),))
    return list(offered(Constant(rate=rate), mix, Random(1), duration_s=duration_s))


async def ready(pool: Pool, engine: ScriptedEngine, **options: Any) -> Prepared:
    found = await prepare(pool, target_of(engine.url), None, timeout_s=10, **options)
    engine.recorded.clear()
    return found


async def measure(
    engine: ScriptedEngine,
    requests: Iterable[Offered],
    *,
    duration_s: float,
    timeout_s: float = 20,
    on_sample: Callable[[Sample], None] | None = None,
    prepared: Prepared | None = None,
    answers: Callable[[Recorded], Any] | None = None,
    window: Window | None = None,
    long_tokens: float | None = None,
) -> Measured:
    """Load on a scripted engine; all of its time is counted, or the `window`. `answers` come into force once the engine
    was calibrated."""
    pool = Pool()
    try:
        prepared = prepared or await ready(pool, engine)
        engine.script.on_request = answers
        return await offer(
            pool,
            prepared,
            requests,
            duration_s=duration_s,
            timeout_s=timeout_s,
            objectives=Objectives(),
            on_sample=on_sample,
            window=window or Window(0.0, duration_s),
            long_tokens=long_tokens,
        )
    finally:
        await pool.close()


async def idle(engine: ScriptedEngine) -> None:
    """Returns when nothing runs there: an engine hears of a closed socket a moment later. The test's own time-out ends it."""
    while not engine.is_idle:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)
