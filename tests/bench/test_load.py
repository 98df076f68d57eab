"""The load client against engines whose doings are known."""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from time import monotonic

import pytest
from tests.bench.service import Stamped, end, evenly, event, idle, measure, prompt_of, stream, token, told

from twinpool.bench import load
from twinpool.bench.answer import Failed, StreamedAnswer
from twinpool.bench.run import Measured, report, warnings_of
from twinpool.bench.words import failures_line
from twinpool.cli.bench import as_result
from twinpool.engines.scripted import End, Recorded, Reply, ScriptedEngine
from twinpool.measure.blocks import Window
from twinpool.measure.indicators import Limits
from twinpool.measure.report import Report
from twinpool.measure.sample import Sample
from twinpool.workload.offered import Offered


def reported(tested: Measured) -> Report:
    return report([tested], Limits(), unobserved="nobody looked", seed=1)


async def test_every_figure_is_within_two_percent_of_what_the_engine_did(engine: ScriptedEngine) -> None:
    """The engine notes when it wrote each token. Its pauses are long, so that a busy machine's hiccups weigh little."""
    streams: list[tuple[Recorded, Stamped]] = []

    def answers(recorded: Recorded) -> Reply:
        slow = len(streams) % 4 == 0
        one = Stamped(6, first_s=0.6 if slow else 0.3, then_s=0.2 if slow else 0.1, prompt_tokens=40)
        streams.append((recorded, one))
        return stream(one.chunks())

    samples: list[Sample] = []
    tested = await measure(engine, evenly(20, 3.0, output_tokens=6), duration_s=3.0, on_sample=samples.append, answers=answers)
    found = reported(tested)
    began = min(recorded.arrived_at for recorded, _ in streams)  # the first was meant for the very beginning
    meant = [began + at / 20 for at in range(60)]
    written = [one.written for _, one in streams]
    ttft = sorted(times[0] - at for times, at in zip(written, meant, strict=True))
    gaps = sorted(b - a for times in written for a, b in pairwise(times))
    worst = sorted(max(b - a for a, b in pairwise(times)) for times in written)
    e2e = sorted(times[-1] - at for times, at in zip(written, meant, strict=True))

    def close(figure: float, truth: float) -> None:
        assert figure == pytest.approx(truth, rel=0.02, abs=0.002)

    for spread, values in ((found.ttft_s, ttft), (found.itl_s, gaps), (found.e2e_s, e2e)):
        assert spread is not None
        close(spread.mean, sum(values) / len(values))
        close(spread.p50, values[len(values) // 2 - 1])
        close(spread.p90, values[round(0.9 * len(values)) - 1])
    assert found.itl_worst_s is not None
    close(found.itl_worst_s.p50, worst[29])
    close(found.itl_worst_s.max, worst[-1])
    inside = [at for times in written for at in times if at < began + 3.0]
    close(found.throughput_output_tok_s, len(inside) / 3.0)
    assert (found.requests, found.failed, found.prompt_tokens_mean, found.output_tokens_mean) == (60, 0, 40, 6)


async def test_an_engine_that_serves_one_at_a_time_shows_its_queue(engine: ScriptedEngine) -> None:
    """BM-03: 40 a second arrive, 20 a second are served. Open loop: what waits is not hidden by waiting to send."""
    free_at = 0.0

    def answers(recorded: Recorded) -> Reply:
        nonlocal free_at
        now = monotonic()
        free_at = max(now, free_at) + 0.05
        return told(2, first_s=free_at - now)

    samples: list[Sample] = []
    tested = await measure(engine, evenly(40, 2.0), duration_s=2.0, on_sample=samples.append, answers=answers)
    ttft = [sample.ttft_s or 0.0 for sample in sorted(samples, key=lambda sample: sample.meant_at_s)]
    assert len(ttft) == 80
    assert ttft[-1] > 1.5  # 79 wait for one another: 4 s of work in 2 s
    assert sum(ttft[40:]) > 2 * sum(ttft[:40])
    assert reported(tested).throughput_req_s < 25


async def test_failures_of_every_kind_are_counted_and_shown(engine: ScriptedEngine) -> None:
    """BM-04: an error under HTTP 200 is no success, nor is a stream without its end."""
    bad = event(error={"message": "out of memory", "code": 500})
    kinds: list[tuple[Reply, Failed | None]] = [
        (told(3), None),
        (Reply.error(429, "slow down"), Failed.REFUSED),
        (Reply.error(503), Failed.REFUSED),
        (Reply.error(400, "too long"), Failed.REJECTED),
        (Reply.error(500), Failed.SERVER_ERROR),
        (Reply.stream(token(), token(), bad, b"data: [DONE]\n\n"), Failed.ERROR_IN_STREAM),
        (Reply.stream(token(), *end(reason="abort")), Failed.ERROR_IN_STREAM),
        (Reply.stream(token(), b"data: not json\n\n", *end()), Failed.ERROR_IN_STREAM),
        (Reply.stream(token(), *end()[:-1]), Failed.TRUNCATED),
        (Reply.stream(token(), b"data: [DONE]\n\n"), Failed.TRUNCATED),
        (Reply.stream(token(), end=End.RESET), Failed.TRUNCATED),
        (Reply.stream(token(), end=End.CLOSE), Failed.TRUNCATED),
        (Reply.stream(*end(completion_tokens=0)), Failed.EMPTY),
        (Reply.reset(), Failed.UNREACHABLE),
        (Reply.stream(token(), end=End.HANG), Failed.TIMED_OUT),
    ]
    requests = [Offered(index / 20, 100 + index, 2, is_long=False) for index in range(len(kinds))]
    by_time: dict[float, str | None] = {}
    tested = await measure(
        engine,
        requests,
        duration_s=1.0,
        timeout_s=2.0,
        on_sample=lambda sample: by_time.update({sample.meant_at_s: sample.failure}),
        answers=lambda recorded: kinds[len(prompt_of(recorded).split()) - 99][0],  # the engine counts a word for the role
    )
    assert [by_time[at] for at in sorted(by_time)] == [kind for _, kind in kinds]
    found = reported(tested)
    assert (found.requests, found.failed) == (15, 14)
    assert sum(found.failures.values()) == 14
    assert found.throughput_output_tok_s == pytest.approx(3)  # of the whole answer alone
    assert tested.generator.messages["refused"] == "429 slow down"
    assert tested.generator.messages["error_in_stream"] == "out of memory"


async def test_a_single_long_gap_in_one_stream_is_seen(engine: ScriptedEngine) -> None:
    count = 0

    def answers(recorded: Recorded) -> Reply:
        nonlocal count
        count += 1
        return stream([(0.0, token()), (1.2 if count == 7 else 0.0, token()), *((0.0, one) for one in end(40, 2))])

    found = reported(await measure(engine, evenly(20, 1.0), duration_s=1.0, answers=answers))
    assert found.itl_worst_s is not None
    assert found.itl_worst_s.max > 1.19
    assert found.itl_worst_s.p50 < 0.6
    assert (found.stalled_time_ratio or 0) > 0.5


async def test_five_tokens_an_event_are_five_tokens(engine: ScriptedEngine) -> None:
    """BM-01."""

    def answers(recorded: Recorded) -> Reply:
        return stream([*((0.2, token("a b c d e ")) for _ in range(4)), *((0.0, one) for one in end(40, 20))])

    tested = await measure(engine, evenly(10, 1.0, output_tokens=20), duration_s=1.0, answers=answers)
    found = reported(tested)
    assert found.itl_s is not None
    assert found.itl_worst_s is not None
    assert found.itl_s.mean == pytest.approx(found.itl_worst_s.p50 / 5, rel=0.3)
    assert tested.generator.tokens_a_piece == 5
    assert any("5.0 tokens at a time" in warning for warning in warnings_of(found, tested.generator, shares_prefixes=False))


async def test_prompts_are_as_long_as_the_engine_counts_them(engine: ScriptedEngine) -> None:
    """BM-06: three tokens a word, twenty for a template; asked for 40 to 3,000."""

    def answers(recorded: Recorded) -> Reply:
        return told(2, prompt_tokens=20 + 3 * len(prompt_of(recorded).split()))

    engine.script.on_request = answers
    lengths = [40, 200, 1000, 3000]
    samples: list[Sample] = []
    requests = [Offered(index / 20, tokens, 2, is_long=False) for index, tokens in enumerate(lengths)]
    tested = await measure(engine, requests, duration_s=0.2, on_sample=samples.append, answers=answers)
    for sample in samples:
        asked = lengths[round(sample.meant_at_s * 20)]
        assert sample.prompt_tokens == pytest.approx(asked, abs=1.5)
    assert (tested.generator.prompt_length_error_ratio or 0) < 0.01


async def test_lengths_that_cannot_be_had_are_told(engine: ScriptedEngine) -> None:
    """A template of 500 tokens in front of prompts that should have 40."""

    def answers(recorded: Recorded) -> Reply:
        return told(2, prompt_tokens=500 + len(prompt_of(recorded).split()))

    engine.script.on_request = answers
    tested = await measure(engine, evenly(20, 0.5), duration_s=0.5, answers=answers)
    said = warnings_of(reported(tested), tested.generator, shares_prefixes=False)
    assert any("off the lengths asked for" in warning for warning in said)
    assert not tested.generator.kept_lengths


async def test_a_token_of_a_short_prompt_is_no_fault(engine: ScriptedEngine) -> None:
    """A prompt of ten tokens cannot be had to one per cent."""
    requests = evenly(20, 0.5, prompt_tokens=10)
    tested = await measure(engine, requests, duration_s=0.5, answers=lambda _: told(2, prompt_tokens=11))
    assert tested.generator.prompt_length_error_ratio == pytest.approx(0.1)
    assert tested.generator.kept_lengths


async def test_a_prompt_is_long_by_what_the_engine_counts(engine: ScriptedEngine) -> None:
    """Asked for 90 and 110 with the border at 100; the engine counts 20 more than it did before."""

    def answers(recorded: Recorded) -> Reply:
        return told(2, prompt_tokens=20 + len(str(recorded.body["messages"]).split()))

    requests = [Offered(at / 20, 90 if at % 2 else 110, 2, is_long=not at % 2) for at in range(10)]
    tested = await measure(engine, requests, duration_s=0.5, answers=answers, long_tokens=100)
    found = reported(tested)
    assert (found.long.requests, found.short.requests) == (10, 0)
    assert found.long.prompt_tokens_mean == pytest.approx(120, abs=2)


async def test_what_failed_is_as_long_as_it_was_meant_to_be(engine: ScriptedEngine) -> None:
    requests = [Offered(at / 20, 110, 2, is_long=True) for at in range(10)]
    tested = await measure(engine, requests, duration_s=0.5, answers=lambda _: Reply.error(500), long_tokens=100)
    assert reported(tested).long.failed == 10


async def test_prompts_under_way_fit_into_memory(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_OPEN_TOKENS", 500)
    requests = [Offered(at / 100, 200, 2, is_long=False) for at in range(10)]
    tested = await measure(engine, requests, duration_s=0.2, answers=lambda _: told(2, first_s=0.5))
    assert reported(tested).failures == {"not_sent": 7}
    assert "500 tokens of prompts" in (tested.generator.complaint or "")
    assert engine.peak_running == 3


async def test_no_prompt_is_sent_twice_and_two_runs_of_one_seed_share_none(engine: ScriptedEngine) -> None:
    """BM-02: a prefix cache would answer what it has seen."""
    prompts = []
    for _ in range(2):
        await measure(engine, evenly(50, 0.6, prompt_tokens=300), duration_s=0.6)
        prompts += [prompt_of(recorded) for recorded in engine.recorded]
    assert len({prompt[:30] for prompt in prompts}) == len(prompts)
    assert len(prompts) >= 60


@pytest.mark.parametrize("counted", [0, 4000])
async def test_a_count_of_tokens_that_cannot_be_is_not_believed(engine: ScriptedEngine, counted: int) -> None:
    def answers(recorded: Recorded) -> Reply:
        return Reply.stream(token(), token(), token(), *end(completion_tokens=counted))

    tested = await measure(engine, evenly(20, 0.5), duration_s=0.5, answers=answers)
    found = reported(tested)
    assert (found.failed, found.output_tokens_mean) == (0, 3)
    assert found.throughput_output_tok_s < 100
    said = warnings_of(found, tested.generator, shares_prefixes=False)
    assert any(f"of {tested.generator.sent} answers the service counted no token" in warning for warning in said)


async def test_usage_below_nothing_is_an_error(engine: ScriptedEngine) -> None:
    bad = event(choices=[], usage={"prompt_tokens": 10, "completion_tokens": -3})
    tested = await measure(engine, evenly(20, 0.2), duration_s=0.2, answers=lambda _: Reply.stream(token(), bad, *end()))
    assert reported(tested).failures == {"error_in_stream": 4}
    assert "Expected `int` >= 0" in tested.generator.messages["error_in_stream"]


async def test_an_event_without_an_end_is_an_error_and_not_read_for_ever(engine: ScriptedEngine) -> None:
    sent = 0

    def flood() -> Iterator[tuple[float, bytes]]:
        nonlocal sent
        for _ in range(2000):
            sent += 1
            yield 0.0, b"data: " + b"x" * 65_536

    requests = [Offered(0.0, 40, 4, is_long=False)]
    tested = await measure(engine, requests, duration_s=0.2, answers=lambda _: stream(flood()))
    assert reported(tested).failures == {"error_in_stream": 1}
    assert tested.generator.messages["error_in_stream"] == "an event of more than 1 MiB that has no end"
    assert sent < 2000


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_events_are_found_however_they_come_in_pieces(ending: bytes, size: int) -> None:
    answer = StreamedAnswer(asyncio.get_running_loop().create_future())
    answer.on_head(200, [])
    whole = b"".join([token(), token(), token(), *end()]).replace(b"\n", ending)
    for at in range(0, len(whole), size):
        answer.on_body(whole[at : at + size])
    answer.on_end()
    assert (answer.failure, len(answer.pieces), answer.believed_tokens(3)) == (None, 3, 3)


async def test_answers_longer_than_the_counted_time_are_told(engine: ScriptedEngine) -> None:
    tested = await measure(engine, evenly(20, 0.2), duration_s=0.2, answers=lambda _: told(3, first_s=0.4))
    found = reported(tested)
    assert found.throughput_req_s == 0
    assert found.goodput_req_s > 0
    said = warnings_of(found, tested.generator, shares_prefixes=False)
    assert any("longer than the 0.2 s that are counted" in warning for warning in said)


async def test_what_failed_outside_the_counted_time_is_said(engine: ScriptedEngine) -> None:
    window = Window(0.1, 0.4)

    def answers(recorded: Recorded) -> Reply:
        return Reply.error(500) if len(engine.recorded) == 1 else told(3)

    tested = await measure(engine, evenly(20, 0.4), duration_s=0.4, answers=answers, window=window)
    result = as_result(reported(tested), tested.generator)
    assert failures_line(result) == "6 requests counted, 0 failed, and 1 that is not counted"


async def test_a_warm_cache_is_told(engine: ScriptedEngine) -> None:
    def answers(recorded: Recorded) -> Reply:
        return stream([(0.0, token()), *((0.0, one) for one in end(40, 1, cached=32))])

    tested = await measure(engine, evenly(20, 0.5), duration_s=0.5, answers=answers)
    found = reported(tested)
    assert found.cached_tokens_ratio == pytest.approx(0.8)
    assert any("warm cache" in said for said in warnings_of(found, tested.generator, shares_prefixes=False))
    assert not any("warm cache" in said for said in warnings_of(found, tested.generator, shares_prefixes=True))


async def test_a_generator_that_is_late_says_so_and_its_lateness_is_in_the_times(engine: ScriptedEngine) -> None:
    """BM-03. The requests come out of an iterator that stops the whole client for a while."""

    def late() -> Iterator[Offered]:
        for request in evenly(50, 0.4):
            if request.at_s == pytest.approx(0.2):
                time.sleep(0.3)
            yield request

    samples: list[Sample] = []
    tested = await measure(engine, late(), duration_s=0.4, on_sample=samples.append)
    assert not tested.generator.kept_schedule
    assert "could not keep its schedule" in (tested.generator.complaint or "")
    assert tested.generator.lag_max_s > 0.25
    assert max(sample.ttft_s or 0.0 for sample in samples) > 0.25


async def test_nothing_is_left_behind(engine: ScriptedEngine) -> None:
    await measure(engine, evenly(50, 0.5), duration_s=0.5)
    await idle(engine)


async def test_a_connection_that_was_closed_while_it_rested_is_no_failure(engine: ScriptedEngine) -> None:
    """Some servers close a kept connection after each stream and do not say so: the second request meets such a one."""
    samples: list[Sample] = []
    tested = await measure(
        engine,
        evenly(4, 1.0),
        duration_s=1.0,
        on_sample=samples.append,
        answers=lambda recorded: Reply.reset() if len(engine.recorded) == 2 else told(2),
    )
    assert [sample.failure for sample in samples] == [None] * 4
    assert len(engine.recorded) == 5
    assert reported(tested).failed == 0
