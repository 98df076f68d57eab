"""A small load that tells a stranger's service by its two indicators, and knows when to stop.

    short streams   ════════════════════════════════════════   a few at a time, one after the other
    long prompts        ███      ███      ███                  one at a time; as long a pause behind each as it took

So at most one long prompt is ever read for it, half of the time. It ends when enough is known, when its time is over, and at
once when the service refuses or breaks: a probe must never be what brings a service down.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from twinpool.bench.answer import Failed, StreamedAnswer
from twinpool.bench.load import body_of, exchange
from twinpool.bench.prepare import Prepared
from twinpool.http1 import Deadlines, Pool
from twinpool.measure.indicators import FEWEST_LONG
from twinpool.measure.interference import Span
from twinpool.measure.sample import Sample
from twinpool.workload.offered import Offered

STREAMS = 3
"""Beside one long prompt they fill the four slots that small engines have."""

STREAM_TOKENS = 256
SHORT_PROMPT_TOKENS = 64
LONG_OUTPUT_TOKENS = 16
LONG_FACTOR = 4 / 3
"""Long prompts are so much longer than the border: 2,000 tokens at 1,500."""

ENOUGH_LONG = FEWEST_LONG + 4
"""Some may fail."""

LONGEST_PAUSE_S = 10.0
SHORTEST_PAUSE_S = 0.2
_LOOK_S = 0.05

MOST_REFUSED = 3
"""In a row: then the service wants no more of it."""

MOST_FAILED = 5
"""In a row, of any kind."""


@dataclass(slots=True)
class Probed:
    """What was seen. Times on `time.monotonic`; the samples' from the beginning."""

    began: float
    ended: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    streams: list[list[float]] = field(default_factory=list)
    reads: list[Span] = field(default_factory=list)
    controls: list[Span] = field(default_factory=list)
    stopped: str | None = None
    """Why it ended before its time."""
    over: str | None = None
    """Its time was, before it knew enough."""
    messages: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    """As the service's `x-twinpool-path` says."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a probe is, for who shows it."""

    long_answered: int
    elapsed_s: float
    last_ttft_s: float | None


class Probe:
    """One probe of one service. `knows_enough` is asked after each long prompt."""

    def __init__(
        self,
        pool: Pool,
        prepared: Prepared,
        *,
        long_prompt_tokens: int,
        duration_s: float,
        timeout_s: float,
        knows_enough: Callable[[int], bool] = lambda answered: answered >= ENOUGH_LONG,
        show: Callable[[Seen], None] | None = None,
    ) -> None:
        self._pool = pool
        self._prepared = prepared
        self._border_tokens = long_prompt_tokens
        self._long_tokens = round(LONG_FACTOR * long_prompt_tokens)
        self._duration_s = duration_s
        self._timeout_s = timeout_s
        self._knows_enough = knows_enough
        self._show = show
        self._deadlines = Deadlines(connect_s=min(10.0, timeout_s), first_byte_s=timeout_s, idle_s=timeout_s)
        self._failed_in_a_row = 0
        self._refused_in_a_row = 0
        self._over = asyncio.Event()
        self._running: set[StreamedAnswer] = set()
        self._last_ttft_s: float | None = None
        self.offered_tokens = 0
        self.probed = Probed(monotonic())

    async def run(self) -> Probed:
        probed = self.probed
        probed.began = monotonic()
        tasks = [asyncio.create_task(self._keep_a_stream()) for _ in range(STREAMS)]
        long = asyncio.create_task(self._send_long_prompts())
        over = asyncio.create_task(self._over.wait())
        try:
            async with asyncio.timeout(self._duration_s):
                await asyncio.wait({long, over}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            probed.over = f"{self._duration_s:g} s (--duration) were over before it knew enough"
        finally:
            for task in (*tasks, long, over):
                task.cancel()
            for task in (*tasks, long, over):
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            probed.ended = monotonic()
        return probed

    async def _keep_a_stream(self) -> None:
        """One short stream after the other."""
        while True:
            answer = await self._ask(SHORT_PROMPT_TOKENS, STREAM_TOKENS, is_long=False)
            if answer.failure is not None:
                await asyncio.sleep(1.0)

    async def _send_long_prompts(self) -> None:
        await self._pause(SHORTEST_PAUSE_S * 4)
        answered = 0
        while not self._knows_enough(answered):
            sent = monotonic()
            answer = await self._ask(self._long_tokens, LONG_OUTPUT_TOKENS, is_long=True)
            if answer.failure is None:
                answered += 1
                self._check_length(answer)
                self.probed.reads.append(Span(sent, answer.pieces[0]))
                self._last_ttft_s = answer.pieces[0] - sent
            began = monotonic()
            took_s = self._last_ttft_s or 1.0
            await self._pause(min(max(took_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
            self.probed.controls.append(Span(began, monotonic()))
            if self._show is not None:
                self._show(Seen(answered, monotonic() - self.probed.began, self._last_ttft_s))

    async def _pause(self, seconds: float) -> None:
        """As long as that, and until some stream flows, for without one there is nothing to be seen of it; but not for ever:
        some services give an answer in one piece."""
        await asyncio.sleep(seconds)
        last = monotonic() + LONGEST_PAUSE_S
        while monotonic() < last and not any(len(answer.pieces) > 1 for answer in self._running):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, prompt_tokens: int, output_tokens: int, *, is_long: bool) -> StreamedAnswer:
        prepared, probed = self._prepared, self.probed
        request = Offered(0.0, prompt_tokens, output_tokens, is_long)
        fields = {"model": prepared.target.model, "stream": True, "stream_options": {"include_usage": True}, **prepared.fields}
        body = body_of(prepared.target, prepared.prompts.text(request), output_tokens, fields)
        answer = StreamedAnswer(asyncio.get_running_loop().create_future())
        self.offered_tokens += prompt_tokens + output_tokens
        sent = monotonic()
        if not is_long:
            self._running.add(answer)
        try:
            async with asyncio.timeout(self._timeout_s):
                await exchange(self._pool, prepared.target, body, answer, self._deadlines)
        except TimeoutError:
            answer.lose(Failed.TIMED_OUT, f"no whole answer within {self._timeout_s:g} s")
        finally:
            self._running.discard(answer)
            if not is_long and len(answer.pieces) > 1:
                probed.streams.append(list(answer.pieces))
        self._learn(answer)
        probed.samples.append(self._sample(answer, sent, prompt_tokens, output_tokens, is_long=is_long))
        return answer

    def _learn(self, answer: StreamedAnswer) -> None:
        """Of failures: a service that refuses or breaks is left alone."""
        if answer.failure is None:
            self._failed_in_a_row = self._refused_in_a_row = 0
            self.probed.paths.update(value.decode("latin-1") for name, value in answer.headers if name == b"x-twinpool-path")
            return
        self.probed.messages.setdefault(answer.failure, answer.message)
        self._failed_in_a_row += 1
        self._refused_in_a_row = self._refused_in_a_row + 1 if answer.failure is Failed.REFUSED else 0
        if self._refused_in_a_row >= MOST_REFUSED:
            self._stop(f"the service refused {MOST_REFUSED} requests in a row ({answer.message})")
        elif self._failed_in_a_row >= MOST_FAILED:
            self._stop(f"{MOST_FAILED} requests in a row failed ({answer.failure.replace('_', ' ')}: {answer.message})")

    def _check_length(self, answer: StreamedAnswer) -> None:
        """Of a long prompt: one that the service takes for a short one, or cuts, shows nothing of long ones."""
        counted = answer.usage.prompt_tokens if answer.usage is not None else self._long_tokens
        if counted <= self._border_tokens:
            self._stop(
                f"the service counted {counted:,} tokens in a prompt of {self._long_tokens:,}, which has to be over "
                f"{self._border_tokens:,} to be long"
            )

    def _stop(self, why: str) -> None:
        self.probed.stopped = self.probed.stopped or why
        self._over.set()

    def _sample(self, answer: StreamedAnswer, sent: float, prompt_tokens: int, output_tokens: int, *, is_long: bool) -> Sample:
        meant_at_s = sent - self.probed.began
        if answer.failure is not None:
            return Sample(meant_at_s=meant_at_s, is_long=is_long, prompt_tokens=prompt_tokens, failure=answer.failure)
        pieces, usage = answer.pieces, answer.usage
        return Sample(
            meant_at_s=meant_at_s,
            is_long=usage.prompt_tokens > self._border_tokens if usage else is_long,
            prompt_tokens=usage.prompt_tokens if usage else prompt_tokens,
            output_tokens=answer.believed_tokens(output_tokens) or len(pieces),
            cached_tokens=usage.cached_tokens if usage else 0,
            ttft_s=pieces[0] - sent,
            e2e_s=answer.ended_at - sent,
            gaps_s=[pieces[at + 1] - pieces[at] for at in range(len(pieces) - 1)],
        )
