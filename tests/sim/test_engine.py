from random import Random

import pytest
from tests.sim.plain import Bench, is_gone, profile

from twinpool.core.model import Leg
from twinpool.sim.engine import Scheduling
from twinpool.sim.loop import Rank
from twinpool.sim.sequence import Sequence
from twinpool.workload.offered import Offered


def test_a_prompt_then_a_token_a_step() -> None:
    bench = Bench()
    sequence = bench.gives("a", 100, 3)
    assert bench.runs() == [(10.0, "first", "a"), (30.0, "finished", "a")]
    assert (sequence.gaps.gaps, round(sequence.gaps.worst_s, 6), bench.tokens) == (2, 0.01, 3)


def test_a_prompt_is_read_in_chunks_of_the_budget() -> None:
    bench = Bench(budget=40)
    bench.gives("a", 100)
    bench.runs()
    assert bench.when("first", "a") == pytest.approx(10.0)
    assert bench.engine.totals.steps == 3


def test_running_sequences_take_their_tokens_out_of_the_budget_first() -> None:
    bench = Bench(budget=101)
    bench.gives("a", 10, 100)
    bench.gives("b", 200, at_ms=5)
    bench.runs()
    assert bench.engine.totals.mixed_steps == 2  # 100 tokens beside one decode, twice


def test_a_mixed_step_is_a_gap_for_all_who_run() -> None:
    bench = Bench(costs=profile(mixed_step_extra_ms=7.0))
    a = bench.gives("a", 100, 10)
    bench.gives("b", 300, at_ms=15)
    bench.runs()
    assert a.gaps.worst_s == pytest.approx(0.010 + 0.030 + 0.007)


def test_whole_prompts_first_stop_everything_else() -> None:
    bench = Bench(scheduling=Scheduling.PREFILL_FIRST, budget=100)
    a = bench.gives("a", 100, 10)
    bench.gives("b", 3000, at_ms=15)
    bench.runs()
    assert a.gaps.worst_s == pytest.approx(0.3 + 0.01)
    assert (a.gaps.over, bench.engine.totals.mixed_steps) == (1, 0)


def test_a_stream_knows_its_own_gaps_alone() -> None:
    bench = Bench()
    a = bench.gives("a", 100, 40)
    bench.gives("b", 900, at_ms=15)  # a gap of 100 ms for a
    late = bench.gives("c", 100, 20, at_ms=250)
    bench.runs()
    assert (a.gaps.over, a.gaps.gaps) == (1, 39)
    assert (late.gaps.over, late.gaps.gaps, round(late.gaps.worst_s, 6)) == (0, 19, 0.01)
    assert late.gaps.total_s == pytest.approx(0.19)


def test_a_prompt_waits_for_room() -> None:
    bench = Bench(kv_tokens=350)
    bench.gives("a", 200, 5)
    bench.gives("b", 200, 1, at_ms=1)
    bench.runs()
    assert bench.when("first", "b") == pytest.approx(bench.when("finished", "a") + 20)


def test_what_is_held_for_another_engine_takes_room_until_it_is_freed() -> None:
    bench = Bench(kv_tokens=350)
    held = bench.gives("a", 200, leg=Leg.PREFILL)
    bench.gives("b", 200, 1)
    bench.at(500, bench.engine.free, held)
    assert bench.runs() == [(20.0, "read", "a"), (520.0, "first", "b"), (520.0, "finished", "b")]
    assert bench.engine.kv_used == 0


def test_a_lease_that_ends_gives_room_without_anybodys_doing() -> None:
    bench = Bench(kv_tokens=350)
    held = bench.gives("a", 200, leg=Leg.PREFILL)
    held.expires = 0.3
    bench.gives("b", 200, 1)
    bench.runs()
    assert bench.when("first", "b") == pytest.approx(320.0)
    assert is_gone(held)


def test_a_handed_over_sequence_waits_for_room_then_for_its_kv_then_for_the_next_step() -> None:
    bench = Bench(kv_tokens=350)
    a = bench.gives("a", 200, 3, leg=Leg.DECODE)
    b = bench.gives("b", 200, 2, leg=Leg.DECODE)
    bench.at(5, bench.engine.join, a)
    bench.at(40, bench.engine.join, b)
    assert bench.runs() == [
        (0.0, "room", "a"),
        (15.0, "first", "a"),
        (35.0, "finished", "a"),
        (35.0, "room", "b"),
        (50.0, "first", "b"),
        (60.0, "finished", "b"),
    ]


def test_the_last_to_join_gives_way_when_the_kv_is_full_and_writes_its_tokens_all_the_same() -> None:
    bench = Bench(kv_tokens=240)
    a = bench.gives("a", 100, 40)
    b = bench.gives("b", 100, 40)
    bench.runs()
    assert bench.engine.totals.preemptions > 0
    assert bench.when("finished", "a") < bench.when("finished", "b")
    assert [(s.gaps.gaps, s.written) for s in (a, b)] == [(39, 40), (39, 40)]
    assert b.gaps.worst_s > 0.1  # stood still until a had finished
    assert bench.engine.kv_used == 0


def test_an_idle_engine_begins_with_all_that_comes_at_that_moment() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.loop.call_at(0.0, Rank.HANDOFF, bench.engine.submit, Sequence(name, Leg.WHOLE, Offered(0.0, 200, 1, False)))
    bench.runs()
    assert bench.when("first", "a") == bench.when("first", "b") == 40.0


def test_of_one_step_the_first_tokens_are_told_before_the_ends() -> None:
    bench = Bench()
    bench.gives("a", 100, 2)
    bench.gives("b", 100, 1, at_ms=5)
    said = bench.runs()
    at = bench.when("finished", "a")
    assert [(what, name) for when, what, name in said if when == at] == [("first", "b"), ("finished", "a"), ("finished", "b")]


def test_what_comes_within_a_leap_begins_with_the_next_step() -> None:
    bench = Bench()
    bench.gives("a", 100, 60)
    bench.gives("b", 100, 1, at_ms=107)  # in the middle of a's tenth step
    bench.runs()
    assert bench.when("first", "b") == pytest.approx(110 + 10 + 10)
    assert bench.when("finished", "a") == pytest.approx(10 + 59 * 10 + 10)


def test_a_leap_takes_as_long_as_its_steps() -> None:
    growing = profile(decode_step_ms=((1, 100, 10.0), (1, 1100, 20.0), (8, 100, 10.0), (8, 1100, 20.0)))
    leaping, cut = Bench(costs=growing), Bench(costs=growing)
    leaping.gives("a", 100, 200)
    cut.gives("a", 100, 200)
    for n in range(300):  # a client that leaves at once, every 7 ms: no leap is longer than a step
        gone = cut.gives(f"x{n}", 1, 1, at_ms=20 + 7 * n)
        cut.at(20 + 7 * n, cut.engine.cancel, gone)
    leaping.runs()
    cut.runs()
    assert cut.engine.totals.steps == leaping.engine.totals.steps
    assert leaping.when("finished", "a") == pytest.approx(cut.when("finished", "a"), rel=1e-3)


def test_the_slow_engine_takes_longer() -> None:
    bench = Bench()
    bench.engine.slowness = 3.0
    bench.gives("a", 100, 2)
    assert bench.runs() == [(30.0, "first", "a"), (60.0, "finished", "a")]


def test_a_beginning_that_was_read_before_need_not_be_read_again() -> None:
    bench = Bench(budget=8000)
    bench.gives("a", 1200, 1, prefix=(1, 2, 3))
    again = bench.gives("b", 1200, 1, at_ms=500, prefix=(1, 2, 9))
    bench.runs()
    assert again.cached_tokens == 1024
    assert bench.when("first", "b") == pytest.approx(500 + 17.6)


def test_the_last_prompt_token_is_read_whatever_is_cached() -> None:
    bench = Bench(budget=8000)
    bench.gives("a", 1024, 1, prefix=(1, 2))
    again = bench.gives("b", 1024, 1, at_ms=500, prefix=(1, 2))
    bench.runs()
    assert again.cached_tokens == 1023


def test_a_dead_engine_takes_all_with_it() -> None:
    bench = Bench()
    a = bench.gives("a", 100, 50)
    held = bench.gives("h", 100, leg=Leg.PREFILL)
    lost: list[str] = []
    bench.loop.call_at(0.1, 2, lambda at, _: lost.extend(s.request for s in bench.engine.halt(at)))
    bench.runs()
    assert lost == ["a", "h"]
    assert all(is_gone(sequence) for sequence in (a, held))
    assert 0 < a.written < 50
    assert a.gaps.gaps == a.written - 1
    assert (bench.engine.kv_used, bench.engine.running) == (0, 0)


def test_an_engine_that_dies_within_a_leap_has_sent_what_its_steps_wrote() -> None:
    bench = Bench()
    a = bench.gives("a", 100, 50)  # its first token at 10 ms, then one every 10
    bench.loop.call_at(0.105, 2, lambda at, _: bench.engine.halt(at))
    bench.runs()
    assert (a.written, bench.tokens, bench.engine.totals.steps) == (10, 10, 10)
    assert a.last_token_at == pytest.approx(0.1)
    assert a.gaps.total_s == pytest.approx(0.09)


def test_a_preempted_stream_has_every_gap_once() -> None:
    bench = Bench(kv_tokens=260)
    bench.gives("a", 100, 60)
    b = bench.gives("b", 100, 60)
    bench.runs()
    assert bench.engine.totals.preemptions
    assert b.gaps.gaps == 59
    assert b.gaps.total_s == pytest.approx((bench.when("finished", "b") - bench.when("first", "b")) / 1e3)


@pytest.mark.parametrize("scheduling", list(Scheduling))
@pytest.mark.parametrize("seed", range(4))
def test_whoever_leaves_whenever_leaves_nothing_behind(seed: int, scheduling: Scheduling) -> None:
    rng = Random(seed)
    bench = Bench(kv_tokens=3000, budget=300, sequences=6, scheduling=scheduling)
    begun = []
    for n in range(200):
        at_ms = n * 30 + rng.random() * 10
        leg = rng.choice([Leg.WHOLE, Leg.PREFILL, Leg.DECODE])
        prefix = tuple(range(rng.randrange(3)))
        sequence = bench.gives(f"s{n}", rng.randrange(1, 1200), rng.randrange(1, 60), at_ms=at_ms, leg=leg, prefix=prefix)
        begun.append(sequence)
        later_ms = at_ms + rng.random() * 300
        if leg is Leg.DECODE:
            bench.at(later_ms, bench.engine.join, sequence)
        if leg is Leg.PREFILL:
            bench.at(later_ms, bench.engine.free, sequence)
            bench.at(later_ms + 9000, bench.engine.cancel, sequence)
        elif rng.random() < 0.3 or leg is Leg.DECODE:
            bench.at(later_ms + rng.random() * 3000, bench.engine.cancel, sequence)
    bench.runs()
    assert bench.engine.kv_used == 0
    assert (bench.engine.running, bench.engine.waiting) == (0, 0)
    assert all(is_gone(sequence) for sequence in begun)
    finished = {name for _, what, name in bench.said if what == "finished"}
    assert len(finished) > 20
    for sequence in begun:
        if sequence.request in finished:
            assert sequence.written == sequence.output_tokens
            assert sequence.gaps.gaps == sequence.output_tokens - 1
