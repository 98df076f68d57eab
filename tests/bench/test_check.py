"""The verdict on services that are known: with interference and without, fit and not."""

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

import msgspec
import pytest
from tests.bench.service import end, idle, prompt_of, stream, token

from twinpool.bench import probe
from twinpool.bench.check import (
    Asked,
    Checked,
    check_one,
    compare_two,
    compared_lines,
    exit_code,
    merge,
    result_of,
    turns,
)
from twinpool.bench.target import target_of
from twinpool.config import Objectives
from twinpool.engines.scripted import Recorded, Reply, ScriptedEngine
from twinpool.http1 import Pool
from twinpool.measure.indicators import Limits, Load

ASKED = Asked(objectives=Objectives(long_prompt_tokens=300), timeout_s=10.0, duration_s=30.0)
GAP_S = 0.01
READ_S = 0.15


class Engine:
    """Reads one long prompt at a time, for `read_s`. Where it is colocated, its streams stand still meanwhile."""

    def __init__(self, *, is_colocated: bool, read_s: float = READ_S, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._read_s = read_s
        self._is_colocated = is_colocated
        self._headers = headers
        self._reading_until = 0.0

    def __call__(self, recorded: Recorded) -> Reply:
        tokens = len(prompt_of(recorded).split())
        count = int(recorded.body["max_tokens"])
        if tokens > 300:
            self._reading_until = monotonic() + self._read_s
            chunks: Any = [(self._read_s, token()), *((GAP_S, token()) for _ in range(count - 1))]
        else:
            chunks = self._written(count, tokens)
        reply = stream((*chunks, *((0.0, one) for one in end(tokens, count))) if isinstance(chunks, list) else chunks)
        return replace(reply, headers=reply.headers + self._headers)

    def _written(self, count: int, prompt_tokens: int) -> Iterator[tuple[float, bytes]]:
        for _ in range(count):
            wait_s = max(0.0, self._reading_until - monotonic()) if self._is_colocated else 0.0
            yield wait_s + GAP_S, token()
        for one in end(prompt_tokens, count):
            yield 0.0, one


async def checked(engine: ScriptedEngine, answers: Any, asked: Asked = ASKED, enough: int = 24) -> Checked:
    engine.script.on_request = answers
    engine.script.metrics = {"vllm:num_requests_running": None}
    pool = Pool()
    try:
        return await check_one(pool, target_of(engine.url), asked, enough_long=enough)
    finally:
        await pool.close()


async def test_streams_that_stand_still_are_found_and_disaggregation_is_advised(engine: ScriptedEngine) -> None:
    result = result_of(await checked(engine, Engine(is_colocated=True), enough=8), ASKED)
    assert result["interference"]["found"] == "yes"
    assert result["interference"]["worst_gap_s"] > READ_S / 2
    assert result["advice"].startswith("Disaggregation would help the gaps here")


async def test_streams_that_flow_are_left_alone(engine: ScriptedEngine) -> None:
    result = result_of(await checked(engine, Engine(is_colocated=False), enough=8), ASKED)
    assert result["interference"]["found"] == "no"
    assert result["advice"].startswith("Disaggregation would not help the gaps here, or is on already")


async def test_a_service_that_says_it_is_disaggregated_is_believed(engine: ScriptedEngine) -> None:
    answers = Engine(is_colocated=False, headers=((b"x-twinpool-path", b"disaggregated"),))
    result = result_of(await checked(engine, answers, enough=8), ASKED)
    assert result["advice"].startswith("Disaggregation is on, and works")


async def test_what_is_fit_and_what_cannot_be_observed(engine: ScriptedEngine) -> None:
    seen = await checked(engine, Engine(is_colocated=False))
    result = result_of(seen, ASKED)
    assert result["verdict"] == "unknown"  # one passes, the other cannot be observed
    assert "not observable" in result["reasons"][1]
    assert result["long"]["requests"] >= 24
    assert result["long"]["ttft_s"]["mean"] >= READ_S
    strict = msgspec.structs.replace(ASKED.limits, ttft_long_s=READ_S / 2)
    assert result_of(seen, replace(ASKED, limits=strict))["verdict"] == "fail"
    seen.windows = [Load(float(n), 0.5 + n / 100) for n in range(40)]
    assert result_of(seen, ASKED)["verdict"] == "pass"  # 0.87 at the peak
    assert result_of(seen, replace(ASKED, limits=Limits(utilization_floor_ratio=0.9)))["verdict"] == "fail"
    seen.windows = seen.windows[:29]
    assert result_of(seen, ASKED)["verdict"] == "unknown"


async def test_few_long_requests_are_too_few(engine: ScriptedEngine) -> None:
    seen = await checked(engine, Engine(is_colocated=False), enough=6)
    seen.windows = [Load(1.0, 0.95)] * 40
    result = result_of(seen, ASKED)
    assert result["verdict"] == "unknown"
    assert "6 long requests were answered, 20 are needed" in result["reasons"][0]


async def test_a_service_that_refuses_is_left_alone_at_once(engine: ScriptedEngine) -> None:
    calm = Engine(is_colocated=False)
    count = 0

    def answers(recorded: Recorded) -> Reply:
        nonlocal count
        count += 1
        return calm(recorded) if count < 8 else Reply.error(429, "quota exceeded")

    seen = await checked(engine, answers)
    result = result_of(seen, ASKED)
    assert result["verdict"] == "unknown"
    assert any("refused 3 requests in a row (429 quota exceeded)" in note for note in result["notes"])
    assert count < 16
    await idle(engine)


async def test_a_service_that_cuts_long_prompts_is_not_judged_by_them(engine: ScriptedEngine) -> None:
    calm = Engine(is_colocated=False)

    def answers(recorded: Recorded) -> Reply:
        tokens = len(prompt_of(recorded).split())
        return stream([(0.0, token()), *((0.0, one) for one in end(256, 1))]) if tokens > 300 else calm(recorded)

    result = result_of(await checked(engine, answers), ASKED)
    assert (result["verdict"], result["long"]["requests"]) == ("unknown", 0)
    assert any("counted 256 tokens in a prompt of 400" in note for note in result["notes"])


async def test_its_load_is_bounded_whatever_the_service_does(engine: ScriptedEngine) -> None:
    await checked(engine, Engine(is_colocated=True), enough=5)
    assert engine.peak_running <= 4
    await idle(engine)


async def test_a_service_that_answers_in_one_piece_is_judged_by_its_long_prompts(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "LONGEST_PAUSE_S", 0.1)

    def answers(recorded: Recorded) -> Reply:
        tokens = len(prompt_of(recorded).split())
        return stream([(0.02, token()), *((0.0, one) for one in end(tokens, 1))])

    result = result_of(await checked(engine, answers, enough=20), ASKED)
    assert result["long"]["requests"] >= 20
    assert result["interference"]["found"] == "unknown"


async def test_its_time_is_bounded(engine: ScriptedEngine) -> None:
    seen = await checked(engine, Engine(is_colocated=False), replace(ASKED, duration_s=2.0))
    assert seen.probes[0].stopped is None
    assert "the probe took all of its time: 2 s (--duration) were over before it knew enough" in result_of(seen, ASKED)["notes"]
    await idle(engine)


async def test_use_is_read_from_the_service_s_own_page(engine: ScriptedEngine) -> None:
    engine.script.on_request = Engine(is_colocated=False)
    pool = Pool()
    seen = await check_one(pool, target_of(engine.url), replace(ASKED, duration_s=12.0))
    await pool.close()
    assert seen.source == f"vLLM at {engine.url}"
    assert [window.busy_ratio for window in seen.windows] == [pytest.approx(1.0, abs=0.11)]


async def test_a_page_that_was_watched_for_too_short_a_time_is_not_said_to_be_missing(engine: ScriptedEngine) -> None:
    engine.script.on_request = Engine(is_colocated=False)
    pool = Pool()
    seen = await check_one(pool, target_of(engine.url), replace(ASKED, duration_s=1.0))
    await pool.close()
    assert "not observable: it was over before its first window of 10 s" in result_of(seen, ASKED)["reasons"][1]


@pytest.mark.timeout(180)
async def test_two_services_are_compared_with_intervals(engine: ScriptedEngine) -> None:
    """The second reads three times as long."""
    async with ScriptedEngine() as other:
        parts: list[list[Checked]] = [[], []]
        for index, enough in turns(2):
            answers = Engine(is_colocated=False, read_s=READ_S * (1 + 2 * index))
            parts[index].append(await checked((engine, other)[index], answers, enough=enough))
    found = compare_two(merge(parts[0]), merge(parts[1]), ASKED)
    assert found["ttft_long_mean_ratio"] > 1.5
    assert found["intervals"]["ttft_long_mean_ratio"][0] > 1
    [line] = [line for line in compared_lines(found, "A", "B") if "TTFT of long" in line]
    assert "not a sure difference" not in line


def test_two_services_take_turns() -> None:
    assert [index for index, _ in turns(2)] == [0, 1, 1, 0]
    assert sum(enough for index, enough in turns(2) if index == 0) >= 20


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(["pass"], 0), (["fail"], 1), (["unknown"], 2), (["pass", "pass"], 0), (["pass", "fail"], 1), (["pass", "unknown"], 2)],
)
def test_exit_codes(verdicts: list[str], code: int) -> None:
    assert exit_code(verdicts) == code
