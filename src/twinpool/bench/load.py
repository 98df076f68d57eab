"""Open-loop load: requests are sent when they are meant to be, whatever has become of those before.

Nothing waits for an answer, so a slow service gets a queue and not less load; and every time counts from the moment that was
meant, so a late generator shows in its own figures. It says how late it was, and when that was too late to be believed.
"""

import asyncio
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic, process_time

import msgspec

from twinpool.bench.answer import Failed, StreamedAnswer
from twinpool.bench.prompts import Prompts
from twinpool.bench.target import Target
from twinpool.http1 import Deadlines, Pool, UpstreamLost
from twinpool.measure.digest import Digest, Layers
from twinpool.measure.sample import Sample
from twinpool.workload.offered import Offered

LATE_S = 0.025
"""Half a usual ITL objective: a generator whose every hundredth request is later than this did not keep its schedule."""

BUSY_SHARE = 0.9
"""Of one core: beyond that the client reads what it gets too late to tell when it came."""

MOST_OPEN = 8192
"""Requests under way; more sockets than any service under test would hold open for one client."""

MOST_OPEN_TOKENS = 100_000_000
"""Of their prompts: half a gigabyte of text, which is kept until it is answered."""

LENGTH_ERROR_SHARE = 0.01
"""Beyond this, prompts were not as long as was asked."""

_BUSY_S = 1.0  # in a shorter time nothing but the start is seen
_OWN_FILES = 64
_ROUTE_HEADERS = (b"x-twinpool-prefill", b"x-twinpool-decode")


class Generator(msgspec.Struct, kw_only=True):
    """What the load client says of itself."""

    sent: int = 0
    planned_s: float = 0.0
    lag_p50_s: float = 0.0
    lag_p99_s: float = 0.0
    lag_max_s: float = 0.0
    cpu_share: float = 0.0
    kept_schedule: bool = True
    peak_in_flight: int = 0
    without_usage: int = 0
    """Whole answers whose tokens had to be counted by pieces."""
    usage_not_believed: int = 0
    """The same, where the service counted no token, or more than were asked for."""
    failed: int = 0
    """Of those sent; also in the time that is not counted."""
    prompt_length_error_ratio: float | None = None
    """Mean distance between the tokens asked for and those that the engine counted."""
    kept_lengths: bool = True
    """That is at most `LENGTH_ERROR_SHARE`, or a token of each prompt."""
    tokens_a_piece: float | None = None
    complaint: str | None = None
    """Why its figures are not to be trusted, where they are not."""
    workers: dict[str, int] = {}
    """Requests by the worker that did part of them, where the service tells (`x-twinpool-prefill`, `x-twinpool-decode`)."""
    messages: dict[str, str] = {}
    """Of each kind of failure, what the first one said."""


@dataclass(slots=True)
class Progress:
    """Where a load is now, for who shows it. Times in seconds from its beginning."""

    duration_s: float
    elapsed_s: float = 0.0
    sent: int = 0
    finished: int = 0
    failed: int = 0
    in_flight: int = 0
    last_ttft_s: dict[bool, float] = field(default_factory=dict)
    """By whether the prompt was long."""


class Load:
    """One run. `on_sample` gets each request once it has ended, in the order of the ends."""

    def __init__(
        self,
        pool: Pool,
        target: Target,
        prompts: Prompts,
        *,
        duration_s: float,
        timeout_s: float,
        on_sample: Callable[[Sample], None],
        fields: dict[str, object],
        on_sent: Callable[[Offered], None] | None = None,
        long_tokens: float | None = None,
    ) -> None:
        self._pool = pool
        self._target = target
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._on_sample = on_sample
        self._on_sent = on_sent
        self._fields = {"model": target.model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self._deadlines = Deadlines(connect_s=min(10.0, timeout_s), first_byte_s=timeout_s, idle_s=timeout_s)
        self._most_open = min(MOST_OPEN, files_allowed() - _OWN_FILES)
        self._lags = Digest()
        self._long_tokens = long_tokens
        self._length_error = self._asked_tokens = self._counted = self._open_tokens = 0
        self._pieces = self._tokens = 0
        self._began = 0.0
        self.progress = Progress(duration_s)
        self.generator = Generator()

    async def run(self, requests: Iterable[Offered]) -> None:
        """Send them all, and wait for those that are under way at the end for at most the time-out."""
        cpu_s, self._began = process_time(), monotonic()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due = self._began + request.at_s
                await asyncio.sleep(max(0.0, due - monotonic()))  # when late, too: what was sent must get on its way
                while (early_s := due - monotonic()) > 0:  # noqa: ASYNC110  # uvloop's timers ring up to 1 ms early
                    await asyncio.sleep(early_s)
                self._send(group, request, due)
            self.generator.planned_s = monotonic() - self._began
            self.generator.cpu_share = (process_time() - cpu_s) / max(self.generator.planned_s, 1e-9)
        self._sum_up()

    def tick(self) -> None:
        """Bring the progress up to now."""
        self.progress.elapsed_s = monotonic() - self._began if self._began else 0.0

    def _send(self, group: asyncio.TaskGroup, request: Offered, due: float) -> None:
        progress = self.progress
        self._lags.add(monotonic() - due)
        progress.sent += 1
        if self._on_sent is not None:
            self._on_sent(request)
        if progress.in_flight >= self._most_open or self._open_tokens > MOST_OPEN_TOKENS:
            self._ended(request, due, _not_sent())
            return
        progress.in_flight += 1
        self._open_tokens += request.prompt_tokens
        self.generator.peak_in_flight = max(self.generator.peak_in_flight, progress.in_flight)
        group.create_task(self._follow(request, due))

    async def _follow(self, request: Offered, due: float) -> None:
        answer = StreamedAnswer(asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._timeout_s):
                await exchange(self._pool, self._target, self._body(request), answer, self._deadlines)
        except TimeoutError:
            answer.lose(Failed.TIMED_OUT, f"no whole answer within {self._timeout_s:g} s")
        finally:
            self.progress.in_flight -= 1
            self._open_tokens -= request.prompt_tokens
        self._ended(request, due, answer)

    def _body(self, request: Offered) -> bytes:
        return body_of(self._target, self._prompts.text(request), request.output_tokens, self._fields)

    def _ended(self, request: Offered, due: float, answer: StreamedAnswer) -> None:
        progress, pieces = self.progress, answer.pieces
        if answer.failure is not None:
            progress.failed += 1
            self.generator.messages.setdefault(answer.failure, answer.message)
            self._on_sample(_failed(request, answer.failure))
            return
        progress.finished += 1
        self._count_workers(answer)
        prompt_tokens, is_long = self._count(request, answer)
        progress.last_ttft_s[is_long] = pieces[0] - due
        self._on_sample(
            Sample(
                meant_at_s=request.at_s,
                is_long=is_long,
                prompt_tokens=prompt_tokens,
                output_tokens=self._written(request, answer),
                cached_tokens=answer.usage.cached_tokens if answer.usage else 0,
                ttft_s=pieces[0] - due,
                e2e_s=answer.ended_at - due,
                gaps_s=[after - before for before, after in pairwise(pieces)],
            )
        )

    def _count_workers(self, answer: StreamedAnswer) -> None:
        workers = self.generator.workers
        for name, value in answer.headers:
            if name in _ROUTE_HEADERS:
                worker = value.decode("latin-1")
                workers[worker] = workers.get(worker, 0) + 1

    def _count(self, request: Offered, answer: StreamedAnswer) -> tuple[int, bool]:
        """The prompt's tokens and class, by the engine's count; and how far that is from what was asked for."""
        usage = answer.usage
        if usage is None:
            self.generator.without_usage += 1
            return request.prompt_tokens, request.is_long
        self._counted += 1
        self._asked_tokens += request.prompt_tokens
        self._length_error += abs(usage.prompt_tokens - request.prompt_tokens)
        border = self._long_tokens
        return usage.prompt_tokens, request.is_long if border is None else usage.prompt_tokens > border

    def _written(self, request: Offered, answer: StreamedAnswer) -> int:
        """The answer's tokens."""
        believed, pieces = answer.believed_tokens(request.output_tokens), len(answer.pieces)
        if believed is None:
            self.generator.usage_not_believed += answer.usage is not None
            return pieces
        self._pieces += pieces
        self._tokens += believed
        return believed

    def _sum_up(self) -> None:
        generator, lags = self.generator, Layers([self._lags])
        generator.sent, generator.failed = self.progress.sent, self.progress.failed
        p50, p99 = lags.quantiles([1.0], (0.5, 0.99))
        generator.lag_p50_s, generator.lag_p99_s, generator.lag_max_s = p50 or 0.0, p99 or 0.0, lags.high
        if self._asked_tokens:
            generator.prompt_length_error_ratio = self._length_error / self._asked_tokens
            generator.kept_lengths = self._length_error <= max(LENGTH_ERROR_SHARE * self._asked_tokens, self._counted)
        if self._pieces:
            generator.tokens_a_piece = self._tokens / self._pieces
        generator.kept_schedule = generator.lag_p99_s <= LATE_S and Failed.NOT_SENT not in generator.messages
        generator.complaint = _complaint(generator, self._most_open)


async def exchange(pool: Pool, target: Target, body: bytes, answer: StreamedAnswer, deadlines: Deadlines) -> None:
    """Ask, and return when the answer is over, one way or another.

    A connection that was kept open and turns out to be closed (some servers close them after each stream, and do not say so)
    is replaced, once: it is no failure of the service, and the time it took counts.
    """
    await _ask(pool, target, body, answer, deadlines, is_fresh=False)
    if answer.is_stale:
        answer.over = asyncio.get_running_loop().create_future()
        await _ask(pool, target, body, answer, deadlines, is_fresh=True)


async def _ask(
    pool: Pool, target: Target, body: bytes, answer: StreamedAnswer, deadlines: Deadlines, *, is_fresh: bool
) -> None:
    request = pool.request(target.origin, "POST", target.path, target.headers, body, answer, deadlines, is_fresh=is_fresh)
    try:
        with await request:
            await answer.over
    except UpstreamLost as lost:
        answer.on_lost(lost)


def body_of(target: Target, text: str, output_tokens: int, fields: dict[str, object]) -> bytes:
    prompt = {"messages": [{"role": "user", "content": text}]} if target.is_chat else {"prompt": text}
    return msgspec.json.encode({**fields, **prompt, "max_tokens": output_tokens})


def files_allowed() -> int:
    """How many files may be open, once the limit is raised as far as this process may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 1_000_000 if most == resource.RLIM_INFINITY else most


def _not_sent() -> StreamedAnswer:
    answer = StreamedAnswer(asyncio.get_running_loop().create_future())
    answer.lose(Failed.NOT_SENT, "too many requests were under way")
    return answer


def _failed(request: Offered, failure: Failed) -> Sample:
    return Sample(meant_at_s=request.at_s, is_long=request.is_long, prompt_tokens=request.prompt_tokens, failure=failure)


def _complaint(generator: Generator, most_open: int) -> str | None:
    if Failed.NOT_SENT in generator.messages:
        return (
            f"over {most_open:,} requests, or {MOST_OPEN_TOKENS:,} tokens of prompts, were under way at once: those beyond "
            "were not sent, and count as failed"
        )
    if not generator.kept_schedule:
        return (
            "the load client could not keep its schedule: one request in a hundred was sent over "
            f"{generator.lag_p99_s * 1000:.0f} ms late (at most {LATE_S * 1000:.0f} ms are fine), and the times hold that; "
            "lower --rate, or give it a core of its own"
        )
    if generator.cpu_share > BUSY_SHARE and generator.planned_s >= _BUSY_S:
        return (
            f"the load client took {generator.cpu_share:.0%} of a core: it may have read answers later than they came; "
            "lower --rate, or give it a core of its own"
        )
    return None
