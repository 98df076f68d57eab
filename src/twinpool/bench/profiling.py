"""Measure what a live engine takes for its work, in minutes, with nothing but its OpenAI routes.

    prefill by length      one prompt at a time, one token asked for: its time to the first token
    decode by batch        so many streams at once, at two contexts: the median gap while all of them run
    a mixed step's extra   prompts thrown in beside running streams: how much longer their gaps are than both halves say
    the handoff            the decode leg's first token, at two lengths of prompt (where a second engine is given)

Every prompt is fresh, so that no cache answers. The engine must be idle but for this: figures of a busy one are refused. All
of it is measured in rounds, not one figure after the other: a machine whose speed wanders is seen at several moments by each.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from time import monotonic
from typing import NamedTuple, TypeVar

import msgspec

from twinpool.bench.answer import StreamedAnswer
from twinpool.bench.load import body_of, exchange
from twinpool.bench.prepare import Prepared
from twinpool.bench.target import Target, ask, complaint, message_of
from twinpool.errors import UserError
from twinpool.handoff.body import take_apart
from twinpool.handoff.nixl import HandoffMissingError, decode_body, prefill_body, read_prefill_answer
from twinpool.http1 import Deadlines, Pool
from twinpool.profile import Profile, rising
from twinpool.workload.offered import Offered

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 3
"""Rounds; of a length that takes long, one."""

STREAM_TOKENS = 48
NEIGHBOUR_TOKENS = 512
"""Of each prompt that another engine reads meanwhile."""

_LONGEST_PREFILL_S = 30.0
"""A length whose prompt takes longer is the last one."""

_FEWEST_GAPS = 8
"""While all streams of a batch run: less says nothing of a median."""


_STEADY_RATIO = 0.2
"""By so much one figure may be more in one round than in another."""

_RAISED_RATIO = 0.005
"""What is raised by less is not worth a note."""

_At = TypeVar("_At", bound=tuple[int, ...])


class EngineSays(msgspec.Struct):
    """What the embedded worker tells of itself; other engines tell less, and what is missing must be given."""

    engine: str = ""
    engine_version: str = ""
    model: str = ""
    context_tokens: int | None = None
    slots: int | None = None
    batch_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    kv_tokens: int | None = None


class Limits(NamedTuple):
    """Of the engine that is measured; what nobody told is given by the user."""

    context_tokens: int
    sequences: int
    kv_tokens: int
    kv_bytes_per_token: int


class Bench(NamedTuple):
    """What is measured with. `show` is told what is being done."""

    pool: Pool
    prepared: Prepared
    timeout_s: float
    show: Callable[[str], None]


class Mixed(NamedTuple):
    """One prompt read beside running streams: it took `seconds`, in `steps` of theirs."""

    batch: int
    context_tokens: int
    prompt_tokens: int
    seconds: float
    steps: int


async def engine_says(pool: Pool, target: Target) -> EngineSays:
    """Empty where it has no such page."""
    answer = await ask(pool, target, "/twinpool/identity")
    if 300 <= answer.status < 400:  # what is not there is 404: this is another place, and so is all else
        raise complaint(target, answer.status, answer.headers, "")
    try:
        return msgspec.json.decode(answer.body, type=EngineSays) if answer.status == 200 else EngineSays()
    except msgspec.DecodeError:
        return EngineSays()


async def measure(
    bench: Bench, limits: Limits, says: EngineSays, *, name: str, decode: Target | None = None, beside: Target | None = None
) -> Profile:
    """The profile; `UserError` where the engine does not answer, or cannot be measured. `beside`: another engine, which reads
    prompts all the while."""
    if limits.sequences < 2:
        raise UserError("the engine runs one sequence at a time: there is no batch to measure. Start it with more slots")
    notes = [f"measured in {REPEATS} rounds, medians; the engine's own HTTP and this client are in the times"]
    async with _reading(bench, limits, beside, notes):
        prefill = await _prefills(bench, limits, notes)
        steps = await _decode_steps(bench, limits, notes)
        mixed = await _mixed_steps(bench, limits, prefill)
    extra_ms = mixed_extra_ms(mixed, prefill, steps)
    handoff = None if decode is None else await _handoffs(bench, limits, decode, steps)
    if handoff is None:
        notes.append(
            "the handoff was not measured, and is left to the defaults of plan: give the engine that decodes with --decode"
        )
    profile = Profile(
        name=name,
        model=says.model or bench.prepared.target.model,
        engine=f"{says.engine} {says.engine_version}".strip() or "unknown",
        source=f"twinpool profile of {bench.prepared.target.url}",
        kv_tokens=limits.kv_tokens,
        kv_bytes_per_token=limits.kv_bytes_per_token,
        prefill_ms=tuple((tokens, seconds * 1e3) for tokens, seconds in prefill),
        decode_step_ms=tuple((batch, context, seconds * 1e3) for (batch, context), seconds in sorted(steps.items())),
        context_tokens=limits.context_tokens,
        max_sequences=limits.sequences,
        mixed_step_extra_ms=max(0.0, extra_ms or 0.0),
        flags={"batch_tokens": says.batch_tokens} if says.batch_tokens else {},
        notes=(*notes, _mixed_note(extra_ms, len(mixed))),
    )
    if handoff is None:
        return profile
    return msgspec.structs.replace(profile, handoff_latency_ms=handoff[0] * 1e3, handoff_bytes_per_s=handoff[1])


def _mixed_note(extra_ms: float | None, prompts: int) -> str:
    if extra_ms is None:
        return "what a mixed step costs extra could not be measured, and is taken to be nothing: no prompt met a running stream"
    return f"mixed step, measured less expected: {extra_ms:+.2f} ms a step, from {prompts} prompts"


@asynccontextmanager
async def _reading(bench: Bench, limits: Limits, beside: Target | None, notes: list[str]) -> AsyncIterator[None]:
    """While this lasts, another engine reads one prompt after the other, as its neighbours of one machine may."""
    if beside is None:
        yield
        return

    async def read_on() -> None:
        while True:
            await _exchange(bench, beside, _body(bench, min(NEIGHBOUR_TOKENS, limits.context_tokens // 2), 1))

    notes.append(f"{beside.url} read prompts all the while")
    neighbour = asyncio.create_task(read_on())
    try:
        yield
    finally:
        neighbour.cancel()
        await asyncio.wait([neighbour])
    if not neighbour.cancelled():
        neighbour.result()


def _medians(times: dict[_At, list[float]], what: str, notes: list[str]) -> dict[_At, float]:
    """Times that do not fall as the work grows: no engine takes less for more of it, only a measurement does."""
    middle = {at: median(seconds) for at, seconds in times.items()}
    apart = max((max(seconds) / min(seconds) - 1 for seconds in times.values()), default=0.0)
    if apart > _STEADY_RATIO:
        notes.append(f"{what}: the rounds' times of the same work are up to {apart:.0%} apart: the machine is not steady")
    risen = rising(middle.items())
    raised = [less for at, seconds in middle.items() if (less := 1 - seconds / risen[at]) >= _RAISED_RATIO]
    if raised:
        notes.append(
            f"{what}: {len(raised)} of {len(middle)} times came out under that of less work, by up to {max(raised):.0%}, "
            "and were raised to it"
        )
    return risen


async def _prefills(bench: Bench, limits: Limits, notes: list[str]) -> list[tuple[int, float]]:
    """(tokens as counted, seconds), rising."""
    found: dict[int, list[float]] = {}
    counted: dict[int, int] = {}
    lengths = [tokens for tokens in LENGTHS if tokens <= limits.context_tokens - 64]
    for nth in range(REPEATS):
        for wanted in tuple(lengths):
            bench.show(f"round {nth + 1} of {REPEATS}: reading a prompt of {wanted:,} tokens")
            began, answer = monotonic(), await _stream(bench, wanted, 1)
            seconds = answer.pieces[0] - began
            found.setdefault(wanted, []).append(seconds)
            counted[wanted] = answer.usage.prompt_tokens if answer.usage else wanted
            if seconds > _LONGEST_PREFILL_S / REPEATS:
                lengths.remove(wanted)
            if seconds > _LONGEST_PREFILL_S:
                lengths = [tokens for tokens in lengths if tokens < wanted]
                break
    fewer = [f"{counted[wanted]:,} tokens in {len(seconds)}" for wanted, seconds in found.items() if len(seconds) < REPEATS]
    if fewer:
        notes.append(
            f"prefill: what takes over {_LONGEST_PREFILL_S / REPEATS:g} s was read in fewer rounds: {', '.join(fewer)}"
        )
    by_length = {(counted[wanted],): seconds for wanted, seconds in found.items()}
    if len(by_length) < 2:
        raise UserError("fewer than two lengths of prompts fit this engine's context: there is nothing to draw a line through")
    return [(tokens, seconds) for (tokens,), seconds in sorted(_medians(by_length, "prefill", notes).items())]


async def _decode_steps(bench: Bench, limits: Limits, notes: list[str]) -> dict[tuple[int, int], float]:
    """Seconds by (sequences, context): a full grid."""
    batches = [batch for batch in BATCHES if batch <= limits.sequences]
    if limits.sequences not in batches and limits.sequences < BATCHES[-1]:
        batches.append(limits.sequences)
    room = min(limits.context_tokens - STREAM_TOKENS, limits.kv_tokens // batches[-1] - STREAM_TOKENS)
    contexts = (min(64, room // 4), min(1024, room))
    if contexts[0] < 8:
        raise UserError(f"{limits.kv_tokens:,} tokens of KV are too few for {batches[-1]} sequences")
    found: dict[tuple[int, int], list[float]] = {}
    for nth in range(REPEATS):
        for context in contexts:
            for batch in batches:
                bench.show(f"round {nth + 1} of {REPEATS}: {batch} stream{'s' if batch > 1 else ''} of {context:,} tokens")
                answers = await asyncio.gather(*(_stream(bench, context, STREAM_TOKENS) for _ in range(batch)))
                step_s = median(_while_all_run(answers, batch))
                found.setdefault((batch, context + STREAM_TOKENS // 2), []).append(step_s)
    return _medians(found, "decode", notes)


def _while_all_run(answers: Sequence[StreamedAnswer], batch: int) -> list[float]:
    begin, end = max(each.pieces[0] for each in answers), min(each.pieces[-1] for each in answers)
    gaps = [
        later - sooner
        for each in answers
        for sooner, later in zip(each.pieces, each.pieces[1:], strict=False)
        if sooner >= begin and later <= end
    ]
    if len(gaps) < _FEWEST_GAPS:
        raise UserError(
            f"{batch} streams at once hardly ran together: the engine takes fewer at a time (give --sequences), or is busy"
        )
    return gaps


async def _mixed_steps(bench: Bench, limits: Limits, prefill: Sequence[tuple[int, float]]) -> list[Mixed]:
    """Prompts of two lengths beside one running stream."""
    found = []
    lengths = [tokens for tokens, seconds in prefill if tokens <= limits.context_tokens // 2 and seconds < 5.0][-2:]
    for wanted in lengths:
        for _ in range(REPEATS):
            bench.show(f"a prompt of {wanted:,} tokens beside a stream")
            running = asyncio.create_task(_stream(bench, 64, 256))
            await asyncio.sleep(3 * dict(prefill)[prefill[0][0]] + 0.3)
            began = monotonic()
            beside = await _stream(bench, wanted, 1)
            first = beside.pieces[0]
            answer = await running
            touched = [
                later - sooner
                for sooner, later in zip(answer.pieces, answer.pieces[1:], strict=False)
                if later > began and sooner < first
            ]
            if touched and answer.pieces[0] < began:
                counted = beside.usage.prompt_tokens if beside.usage else wanted
                found.append(Mixed(1, 64 + len(answer.pieces) // 2, counted, sum(touched), len(touched)))
    return found


def mixed_extra_ms(
    mixed: Iterable[Mixed], prefill: Sequence[tuple[int, float]], steps: dict[tuple[int, int], float]
) -> float | None:
    """A step with a chunk of a prompt in it, over the decode and the chunk by themselves; the median. What a step takes for
    nothing is in both of them, and counts once. The first gap that a prompt touches is the step during which it came. None
    where no prompt touched any."""
    alone = dict(prefill)
    (few, few_s), (more, more_s) = prefill[:2]
    floor_s = max(0.0, few_s - few * (more_s - few_s) / (more - few))
    shortest = min(context for _, context in steps)
    found = []
    for each in mixed:
        nearest = min(alone, key=lambda tokens: abs(tokens - each.prompt_tokens))
        with_chunk = max(1, each.steps - 1)
        read_s = alone[nearest] * each.prompt_tokens / nearest - with_chunk * floor_s
        expected = read_s + each.steps * steps[each.batch, shortest]
        found.append((each.seconds - expected) / with_chunk * 1e3)
    return median(found) if found else None


async def _handoffs(bench: Bench, limits: Limits, decode: Target, steps: dict[tuple[int, int], float]) -> tuple[float, float]:
    """(latency in seconds, bytes a second): the line through the decode leg's first token at two lengths, less one step."""
    target = bench.prepared.target
    step_s = min(steps.values())
    points: list[tuple[int, float]] = []
    for wanted in (128, min(2048, limits.context_tokens // 2)):
        for repeat in range(REPEATS + 1):
            bench.show(f"handing over a prompt of {wanted:,} tokens")
            body = _body(bench, wanted, 2)
            answer = await bench.pool.fetch(
                target.origin, "POST", target.path, target.headers, prefill_body(take_apart(body)), timeout_s=bench.timeout_s
            )
            if answer.status != 200:
                said = message_of(answer.body)
                raise UserError(f"{target.url} did not read a prompt for another engine: {answer.status} {said}")
            try:
                read = read_prefill_answer(answer.body)
            except HandoffMissingError as missing:
                raise UserError(f"{target.url} hands nothing over: {missing}") from missing
            began = monotonic()
            written = await _exchange(bench, decode, decode_body(take_apart(body), read.handle))
            if repeat:  # the first of a length may be a pair's first handshake
                points.append((read.prompt_tokens, written.pieces[0] - began - step_s))
    few, many = min(points)[0], max(points)[0]
    short_s = median(seconds for tokens, seconds in points if tokens == few)
    long_s = median(seconds for tokens, seconds in points if tokens == many)
    a_token = max(1e-9, (long_s - short_s) / (many - few))
    return max(0.0, short_s - few * a_token), limits.kv_bytes_per_token / a_token


async def _stream(bench: Bench, prompt_tokens: int, output_tokens: int) -> StreamedAnswer:
    return await _exchange(bench, bench.prepared.target, _body(bench, prompt_tokens, output_tokens))


def _body(bench: Bench, prompt_tokens: int, output_tokens: int) -> bytes:
    prepared = bench.prepared
    text = prepared.prompts.text(Offered(0.0, prompt_tokens, output_tokens, False))
    fields = {"model": prepared.target.model, "stream": True, "stream_options": {"include_usage": True}, **prepared.fields}
    return body_of(prepared.target, text, output_tokens, fields)


async def _exchange(bench: Bench, target: Target, body: bytes) -> StreamedAnswer:
    answer = StreamedAnswer(asyncio.get_running_loop().create_future())
    deadlines = Deadlines(connect_s=10.0, first_byte_s=bench.timeout_s, idle_s=bench.timeout_s)
    await exchange(bench.pool, target, body, answer, deadlines)
    if answer.failure is not None or not answer.pieces:
        raise UserError(f"{target.url} did not answer: {answer.message or answer.failure}")
    return answer
