"""The truth about one engine: continuous batching, step by step.

    waiting ──admitted, room for its KV──► reading ──read──► running ──its tokens written──► gone
                    ▲                         └──read for another engine──► held ──fetched, freed or expired──► gone
                    └────── preempted, most recent first, when the KV is full ──────┘
    arriving ──room──► coming (its KV is on the link) ──► ready ──next step──► running

A step is one pass over the model: a token for each running sequence and, within the token budget, chunks of the prompts that
are read. `Scheduling.CHUNKED` gives the running ones their token first, then prompts in the order of their coming (vLLM's
default). `Scheduling.PREFILL_FIRST` knows no chunks: whole prompts go first, in steps of their own, and everything that runs
stands still. While nothing changes, several decode steps are taken at once, a leap: each takes longer than the one before by
what the contexts grow. Whatever comes cuts it at the end of the step under way. A leap's steps count as equally long gaps.
"""

from collections import deque
from collections.abc import Callable
from enum import StrEnum
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import Any, NamedTuple, Protocol

from twinpool.core.model import Leg
from twinpool.sim.cost import StepCost
from twinpool.sim.loop import Loop, Rank
from twinpool.sim.prefix_cache import PrefixCache
from twinpool.sim.sequence import Place, Sequence
from twinpool.sim.stream_gaps import GapLimits, StepGaps

_LONGEST_LEAP = 64
"""Steps. With 128 sequences on the profiles at hand the last step of a leap takes 0.7 % longer than its first."""


class Scheduling(StrEnum):
    CHUNKED = "chunked"
    PREFILL_FIRST = "prefill_first"


class EngineLimits(NamedTuple):
    """Fixed when an engine starts."""

    kv_tokens: int
    context_tokens: int
    sequences: int
    budget_tokens: int
    scheduling: Scheduling = Scheduling.CHUNKED
    caches_prefixes: bool = True


class Listener(Protocol):
    """Who is told. Called when the engine's books are in order; may give it new work at once."""

    def prompt_read(self, at: float, sequence: Sequence) -> None: ...
    def first_token(self, at: float, sequence: Sequence) -> None: ...
    def finished(self, at: float, sequence: Sequence) -> None: ...
    def has_room(self, at: float, sequence: Sequence) -> None: ...


Meter = Callable[[float, int, int, float | None], None]
"""Is told that so many tokens, of short and of long requests, came up to now, each so many seconds after its stream's last one;
None for first tokens."""

_Piece = tuple[Callable[[float, Sequence], None], Sequence]
"""Of news: who must be told, and of which sequence."""


# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_, _WAITING, _READING, _ARRIVING, _COMING, _READY, _RUNNING, _HELD, _GONE = Place
_STEP, _BEGIN = Rank.STEP, Rank.BEGIN
_PREFILL = Leg.PREFILL


class EngineTotals:
    """Sums over the engine's life."""

    __slots__ = ("beyond_table_s", "busy_s", "mixed_steps", "preemptions", "read_tokens", "steps", "written_tokens")

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.beyond_table_s = 0.0  # of the busy time: in steps whose figure is extrapolated
        self.steps = 0
        self.mixed_steps = 0
        self.read_tokens = 0
        self.written_tokens = 0
        self.preemptions = 0


class Engine:
    """One engine on the loop. `slowness` stretches every step that begins from now on; `budget_tokens` may be set between
    steps."""

    def __init__(
        self, loop: Loop, cost: StepCost, limits: EngineLimits, listener: Listener, meter: Meter, gap_limits: GapLimits
    ) -> None:
        self.limits = limits
        self.longest_tokens = min(limits.kv_tokens, limits.context_tokens)  # that one sequence can ever have
        self.budget_tokens = limits.budget_tokens
        self._is_chunked = limits.scheduling is Scheduling.CHUNKED
        self.slowness = 1.0
        self.totals = EngineTotals()
        self._loop = loop
        self._cost = cost
        self._listener = listener
        self._meter = meter
        self._gap_limits = gap_limits
        self._version = 0  # of the step under way: the end of one that was cut means nothing
        self._order = 0
        self._cache = PrefixCache()
        self._reset()

    def _reset(self) -> None:
        self._waiting: deque[Sequence] = deque()
        self._reading: list[Sequence] = []
        self._arriving: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self._coming: dict[Sequence, None] = {}
        self._running: dict[Sequence, None] = {}  # in the order of joining; preemption takes from the end
        self._held: dict[Sequence, None] = {}  # in the order of their leases' ends
        self._ends: list[tuple[int, int, Sequence]] = []
        self._newcomers: list[Sequence] = []  # joined since the last decode step
        self._firsts: list[Sequence] = []  # whose first token is out, and not told yet
        self._chunks: list[tuple[Sequence, int]] = []
        self._context = 0  # tokens of KV of the running ones
        self._reserved = 0  # of those that read or come
        self._held_tokens = 0
        self._running_long = 0
        self._batch = 0  # sequences that decode in the step under way
        self._step = 0  # number of decode steps that ended
        self._stepped_at = 0.0  # when the last of them did
        self._leap = 0  # steps under way at once
        self._step_s = 0.0  # the first one's time
        self._growth_s = 0.0  # by which each is longer than the one before
        self._began = 0.0
        self._stood_s = 0.0  # since the last decode step, in steps that only read
        self._is_busy = False  # a step is under way, or is about to begin
        self._gaps = StepGaps(self._gap_limits)

    # What can be seen

    @property
    def kv_used(self) -> int:
        return self._context + self._reserved + self._held_tokens

    def kv_used_ratio(self, at: float) -> float:
        """Of its room, now: with what the steps of a leap under way have written by then."""
        ended = self._steps_until(at - self._began) - 1 if self._leap > 1 else 0
        return (self.kv_used + ended * self._batch) / self.limits.kv_tokens

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._arriving)

    def busy_s(self, at: float) -> float:
        """Up to now, the step under way included."""
        return self.totals.busy_s + (at - self._began if self._leap else 0.0)

    # What is asked of it

    def submit(self, at: float, sequence: Sequence) -> None:
        """A prompt to read; the answer follows here unless it is a prefill leg."""
        sequence.place = _WAITING
        self._waiting.append(sequence)
        self._wake(at)

    def receive(self, at: float, sequence: Sequence) -> None:
        """A handed-over sequence: `has_room` is told when its KV may come, `join` when it is there."""
        sequence.place = _ARRIVING
        self._arriving.append(sequence)
        self._admit_arriving(at)

    def join(self, at: float, sequence: Sequence) -> None:
        if sequence.place is not _COMING:
            return
        del self._coming[sequence]
        sequence.place = _READY
        self._ready.append(sequence)
        self._wake(at)

    def free(self, at: float, sequence: Sequence) -> None:
        """What it held for another engine is not needed any more. Nothing, where it holds nothing for it."""
        if sequence.place is _HELD:
            self._drop_held(sequence)
            self._look_for_room(at)

    def cancel(self, at: float, sequence: Sequence) -> None:
        """Nobody waits for it any more. A step under way is not cut short for it; one that is still on its way is not taken
        when it comes (`Place.GONE`)."""
        place = sequence.place
        sequence.place = _GONE
        if place is _WAITING:
            self._waiting.remove(sequence)
        elif place is _READING:
            self._reading.remove(sequence)
            self._reserved -= sequence.target_tokens
        elif place is _ARRIVING:
            self._arriving.remove(sequence)
        elif place is _COMING:
            del self._coming[sequence]
            self._reserved -= sequence.prompt_tokens
        elif place is _READY:
            self._ready.remove(sequence)
            self._reserved -= sequence.prompt_tokens
        elif place is _RUNNING:
            self._cut(at)
            self._stop(sequence)
        elif place is _HELD:
            self._drop_held(sequence)
        self._look_for_room(at)

    def halt(self, at: float) -> list[Sequence]:
        """It dies, and takes with it what it had: what ran first, what was held last. A leap's ended steps are counted."""
        self.totals.busy_s = self.busy_s(at)
        ended = self._steps_until(at - self._began) - 1 if self._leap > 1 else 0
        if ended:  # no sequence joins or ends within a leap: there is no news
            ended_s = self._leap_s(ended)
            self.totals.steps += ended
            self._tokens_written(self._began + ended_s, ended, ended_s / ended, [])
        stopped = list(self._running)
        for sequence in stopped:
            self._stop(sequence)
        lost = [
            *stopped,
            *self._waiting,
            *self._reading,
            *self._arriving,
            *self._coming,
            *self._ready,
            *self._held,
        ]
        for sequence in lost:
            sequence.place = _GONE
        self._version += 1
        self._cache.clear()
        self._reset()
        return lost

    # Steps

    def _wake(self, at: float) -> None:
        """Something came. An idle engine begins once everything that comes at this moment is there."""
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_at(at, _BEGIN, self._begin_if, self._version)
        elif self._leap > 1:
            self._cut(at)

    def _cut(self, at: float) -> None:
        """End the leap with the step that is under way."""
        if self._leap <= 1:
            return
        steps = self._steps_until(at - self._began)
        if steps < self._leap:
            self._leap = steps
            self._version += 1
            self._loop.call_at(self._began + self._leap_s(steps), _STEP, self._end, self._version)

    def _leap_s(self, steps: int) -> float:
        return steps * (self._step_s + self._growth_s * (steps - 1) / 2)

    def _steps_until(self, elapsed_s: float) -> int:
        """How many steps of the leap have begun by then, those that end just then not counted twice."""
        first, growth = self._step_s, self._growth_s
        if growth > 1e-9 * first:
            half = first - growth / 2
            exact = (sqrt(half * half + 2 * growth * elapsed_s) - half) / growth
        else:
            exact = elapsed_s / first
        return max(1, ceil(exact - 1e-9))

    def _begin_if(self, at: float, version: int) -> None:
        if version == self._version:
            self._begin(at)

    def _begin(self, at: float) -> None:
        if self._held:
            self._expire_held(at)
        ready = self._ready
        while ready and len(self._running) + len(self._reading) < self.limits.sequences:
            sequence = ready.popleft()
            self._reserved -= sequence.prompt_tokens
            self._join_batch(sequence, sequence.prompt_tokens)
        has_preempted = self._make_room() if self._running else False
        chunk_tokens, attended = 0, 0.0
        if (self._waiting or self._reading) and not (has_preempted and self._running):
            chunk_tokens, attended = self._plan_chunks(at)
        batch = len(self._running)
        cost = self._cost
        leap, growth_s = 1, 0.0
        if chunk_tokens and batch and self._is_chunked:
            step_s = cost.mixed(batch, self._context, chunk_tokens, attended)
        elif chunk_tokens:
            batch = 0
            step_s = cost.prefill(chunk_tokens, attended)
        elif batch:
            if not self._newcomers and not self._stood_s:
                room = (self.limits.kv_tokens - self.kv_used) // batch
                leap = max(1, min(_LONGEST_LEAP, self._ends[0][0] - self._step, room))
            step_s = cost.decode(batch, self._context)
            if leap > 1:
                growth_s = (cost.decode(batch, self._context + batch * (leap - 1)) - step_s) / (leap - 1)
        else:
            self._rest(at)
            return
        self._batch = batch
        self._leap = leap
        self._step_s = step_s * self.slowness
        self._growth_s = growth_s * self.slowness
        self._began = at
        self._version += 1
        ends = at + (self._step_s if leap == 1 else self._leap_s(leap))
        self._loop.call_at(ends, _STEP, self._end, self._version)

    def _rest(self, at: float) -> None:
        """Nothing can be done now. Prompts that wait for room held by leases are looked at again when the first one ends."""
        self._is_busy = False
        self._version += 1
        if self._waiting and self._held:
            self._loop.call_at(next(iter(self._held)).expires, _STEP, self._look_again)

    def _look_again(self, at: float, _: Any) -> None:
        self._wake(at)

    def _plan_chunks(self, at: float) -> tuple[int, float]:
        """Which prompts are read in this step, how far: their tokens, and Σ((done + chunk)² - done²)."""
        is_whole = not self._is_chunked
        left = self.budget_tokens - (0 if is_whole else len(self._running))
        chunks, total, attended = self._chunks, 0, 0.0
        for sequence in self._reading:
            if left <= 0:
                break
            done = sequence.read_tokens
            chunk = sequence.target_tokens - done
            if chunk > left and not (is_whole and not chunks):
                chunk = left
            chunks.append((sequence, chunk))
            total += chunk
            attended += chunk * (chunk + 2 * done)
            left -= chunk
        waiting = self._waiting
        while waiting and left > 0 and len(self._running) + len(self._reading) < self.limits.sequences:
            sequence = waiting[0]
            if self.kv_used + sequence.target_tokens > self.limits.kv_tokens:
                break
            done = 0
            if sequence.prefix and self.limits.caches_prefixes:
                done = self._cache.hit_tokens(sequence.prefix, sequence.prompt_tokens)
            chunk = sequence.target_tokens - done
            if chunk > left:
                if is_whole and chunks:
                    break
                if not is_whole:
                    chunk = left
            waiting.popleft()
            sequence.read_tokens = sequence.cached_tokens = done
            sequence.place = _READING
            self._reading.append(sequence)
            self._reserved += sequence.target_tokens
            chunks.append((sequence, chunk))
            total += chunk
            attended += chunk * (chunk + 2 * done)
            left -= chunk
        if total and len(self._cache):
            self._cache.shrink(self.limits.kv_tokens - self.kv_used)
        return total, attended

    def _end(self, at: float, version: int) -> None:
        """The step is over: books first, then news, then the next step."""
        if version != self._version:
            return
        totals, leap = self.totals, self._leap
        step_s = self._step_s if leap == 1 else self._leap_s(leap) / leap
        totals.busy_s += leap * step_s
        totals.steps += leap
        self._leap = 0
        news: list[_Piece] = []
        if self._batch:
            self._tokens_written(at, leap, step_s, news)
        else:
            self._stood_s = self._stood_s + step_s if self._running else 0.0
        if self._chunks:
            totals.mixed_steps += self._batch > 0
            self._chunks_read(at, news)
        if self._firsts:
            self._tell_firsts(at)
        for tell, sequence in news:
            tell(at, sequence)
        if self._arriving:
            self._admit_arriving(at)
        self._begin(at)

    def _tell_firsts(self, at: float) -> None:
        """Before all other news of the step: a gateway notes a first token as it reads it, an end of an answer a turn later."""
        firsts, self._firsts = self._firsts, []
        for sequence in firsts:
            self._listener.first_token(at, sequence)

    def _tokens_written(self, at: float, leap: int, step_s: float, news: list[_Piece]) -> None:
        batch, gaps, cost = self._batch, self._gaps, self._cost
        self.totals.written_tokens += batch * leap
        if batch > cost.largest_batch or self._context > batch * cost.longest_context:
            self.totals.beyond_table_s += leap * step_s
        self._context += len(self._running) * leap
        gap_s = step_s + self._stood_s  # with what others only read meanwhile; a leap never follows such a step
        self._stood_s = 0.0
        gaps.count(gap_s, self._step + 1, leap)
        self._step += leap
        self._stepped_at = at
        step = self._step
        long = self._running_long
        short = len(self._running) - long
        if self._newcomers:
            for sequence in self._newcomers:
                if sequence.is_long:
                    long -= 1
                else:
                    short -= 1
                self._token_of_its_own(at, sequence)
                sequence.gaps.begin(gaps, step)
            self._newcomers.clear()
        if short or long:
            self._meter(at, short * leap, long * leap, gap_s)
        ends = self._ends
        while ends and ends[0][0] <= step:
            ends_at_step, _, sequence = heappop(ends)
            if sequence.place is _RUNNING and sequence.ends_at_step == ends_at_step:
                del self._running[sequence]
                self._running_long -= sequence.is_long
                self._context -= sequence.joined_tokens + step - sequence.joined_step
                self._finish(at, sequence, news)
        if not self._running:
            gaps.forget()

    def _finish(self, at: float, sequence: Sequence, news: list[_Piece]) -> None:
        sequence.place = _GONE
        sequence.written = sequence.output_tokens
        sequence.last_token_at = at
        sequence.gaps.pause(self._gaps)
        news.append((self._listener.finished, sequence))

    def _chunks_read(self, at: float, news: list[_Piece]) -> None:
        for sequence, chunk in self._chunks:
            self.totals.read_tokens += chunk
            if sequence.place is not _READING:  # its client has left meanwhile
                continue
            sequence.read_tokens += chunk
            if sequence.read_tokens < sequence.target_tokens:
                continue
            self._reading.remove(sequence)
            self._reserved -= sequence.target_tokens
            if sequence.leg is _PREFILL:
                sequence.place = _HELD
                self._held[sequence] = None
                self._held_tokens += sequence.target_tokens
                news.append((self._listener.prompt_read, sequence))
            else:
                self._write_from_prompt(at, sequence, news)
            if sequence.prefix and self.limits.caches_prefixes:
                self._cache.add(sequence.prefix, self.limits.kv_tokens - self.kv_used)
        self._chunks.clear()

    def _token_of_its_own(self, at: float, sequence: Sequence) -> None:
        """One whose gap, if it has one, nobody shares: the first on this engine, or the first after a preemption."""
        gap_s = None
        if sequence.last_token_at is not None:
            gap_s = at - sequence.last_token_at
            sequence.gaps.own(gap_s, self._gap_limits)
        sequence.last_token_at = at
        self._meter(at, not sequence.is_long, sequence.is_long, gap_s)
        if not sequence.is_begun:
            sequence.is_begun = True
            self._firsts.append(sequence)

    def _write_from_prompt(self, at: float, sequence: Sequence, news: list[_Piece]) -> None:
        """The step that read the last of a prompt also writes a token."""
        self.totals.written_tokens += 1
        sequence.written += 1
        self._token_of_its_own(at, sequence)
        if sequence.written >= sequence.output_tokens:
            self._finish(at, sequence, news)
        else:
            self._join_batch(sequence, sequence.target_tokens)

    # Small steps

    def _join_batch(self, sequence: Sequence, kv_tokens: int) -> None:
        sequence.place = _RUNNING
        sequence.joined_step = self._step
        sequence.joined_tokens = kv_tokens
        sequence.ends_at_step = self._step + sequence.output_tokens - sequence.written
        self._order += 1
        heappush(self._ends, (sequence.ends_at_step, self._order, sequence))
        self._running[sequence] = None
        self._running_long += sequence.is_long
        self._context += kv_tokens
        self._newcomers.append(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Take it out of the batch before its end; its entry among the ends is ignored when it comes up."""
        if self._step > sequence.joined_step:
            sequence.written += self._step - sequence.joined_step
            sequence.last_token_at = self._stepped_at
        del self._running[sequence]
        self._running_long -= sequence.is_long
        self._context -= sequence.joined_tokens + self._step - sequence.joined_step
        sequence.gaps.pause(self._gaps)
        if sequence in self._newcomers:
            self._newcomers.remove(sequence)

    def _make_room(self) -> bool:
        """A token's KV for each running sequence: the ones that joined last give theirs back, to be read again later."""
        has_preempted = False
        while self._running and self.kv_used + len(self._running) > self.limits.kv_tokens:
            sequence = next(reversed(self._running))
            self._stop(sequence)
            sequence.target_tokens = sequence.prompt_tokens + sequence.written
            sequence.place = _WAITING
            self._waiting.appendleft(sequence)
            self.totals.preemptions += 1
            has_preempted = True
        while self._ends and self._ends[0][2].place is not _RUNNING:
            heappop(self._ends)
        return has_preempted

    def _admit_arriving(self, at: float) -> None:
        while self._arriving:
            sequence = self._arriving[0]
            if self.kv_used + sequence.prompt_tokens > self.limits.kv_tokens:
                return
            self._arriving.popleft()
            if sequence.prefix and self.limits.caches_prefixes:
                sequence.cached_tokens = self._cache.hit_tokens(sequence.prefix, sequence.prompt_tokens)
                self._cache.add(sequence.prefix, self.limits.kv_tokens - self.kv_used - sequence.prompt_tokens)
            sequence.place = _COMING
            self._coming[sequence] = None
            self._reserved += sequence.prompt_tokens
            self._listener.has_room(at, sequence)

    def _look_for_room(self, at: float) -> None:
        """KV was given back: who waited for it may go on."""
        self._admit_arriving(at)
        if self._waiting:
            self._wake(at)

    def _drop_held(self, sequence: Sequence) -> None:
        sequence.place = _GONE
        del self._held[sequence]
        self._held_tokens -= sequence.target_tokens

    def _expire_held(self, at: float) -> None:
        """Leases are equally long, so the first held one ends first."""
        while self._held and (first := next(iter(self._held))).expires <= at:
            self._drop_held(first)
