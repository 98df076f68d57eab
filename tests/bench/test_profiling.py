"""What a profile holds and what it refuses; how right its figures are is measured, not tested."""

import msgspec
import pytest
from tests.bench.service import told

from twinpool.bench import profiling
from twinpool.bench.prepare import prepare
from twinpool.bench.profiling import Bench, EngineSays, Limits, Mixed, engine_says, measure, mixed_extra_ms
from twinpool.bench.target import target_of
from twinpool.engines.scripted import Recorded, Reply, ScriptedEngine
from twinpool.errors import UserError
from twinpool.http1 import Pool
from twinpool.profile import Profile, parse_profile

LIMITS = Limits(context_tokens=700, sequences=2, kv_tokens=1400, kv_bytes_per_token=1024)


async def profile_of(
    engine: ScriptedEngine,
    limits: Limits = LIMITS,
    decode: ScriptedEngine | None = None,
    beside: ScriptedEngine | None = None,
) -> Profile:
    pool = Pool()
    try:
        target = target_of(engine.url)
        says = await engine_says(pool, target)
        prepared = await prepare(pool, target, None, timeout_s=10)
        partner, neighbour = [None if other is None else target_of(other.url) for other in (decode, beside)]
        bench = Bench(pool, prepared, 10, lambda text: None)
        return await measure(bench, limits, says, name="scripted", decode=partner, beside=neighbour)
    finally:
        await pool.close()


async def test_a_profile_without_holes_that_says_where_it_comes_from(engine: ScriptedEngine) -> None:
    engine.script.prefill_s_per_token = 1e-5
    engine.script.token_interval_s = 1e-3
    profile = await profile_of(engine)
    assert engine.url in profile.source
    assert {(batch, context) for batch, context, _ in profile.decode_step_ms} == {
        (batch, context) for batch in profile.batches for context in profile.contexts
    }
    assert profile.batches == (1, 2)
    lengths = [tokens for tokens, _ in profile.prefill_ms]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 400
    assert any("mixed step" in note for note in profile.notes)
    assert any("handoff was not measured, and is left to the defaults" in note for note in profile.notes)
    assert not {"handoff_latency_ms", "handoff_bytes_per_s"} & set(msgspec.json.decode(msgspec.json.encode(profile)))
    assert not any("fewer rounds" in note for note in profile.notes)


async def test_lengths_that_take_long_are_read_in_fewer_rounds_and_named(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_LONGEST_PREFILL_S", 0.9)

    def answers(recorded: Recorded) -> Reply:
        words = len(str(recorded.body["messages"]).split())
        first_s = 0.4 if recorded.body["max_tokens"] == 1 and words > 400 else 0.001
        return told(recorded.body["max_tokens"], first_s=first_s, then_s=0.001, prompt_tokens=words)

    engine.script.on_request = answers
    profile = await profile_of(engine)
    [note] = [note for note in profile.notes if "fewer rounds" in note]
    assert note == f"prefill: what takes over 0.3 s was read in fewer rounds: {profile.prefill_ms[-1][0]} tokens in 1"


def test_what_is_raised_by_next_to_nothing_is_not_noted() -> None:
    notes: list[str] = []
    assert profiling._medians({(1,): [1.0], (2,): [0.999]}, "prefill", notes)[2,] == 1.0
    assert notes == []


async def test_times_do_not_fall_with_more_work_and_what_was_raised_is_noted(engine: ScriptedEngine) -> None:
    def answers(recorded: Recorded) -> Reply:
        words = len(str(recorded.body["messages"]).split())
        first_s = 0.3 if recorded.body["max_tokens"] == 1 and words < 100 else 0.001
        return told(recorded.body["max_tokens"], first_s=first_s, then_s=0.001, prompt_tokens=words)

    engine.script.on_request = answers
    profile = await profile_of(engine)
    (_, shortest), *longer = profile.prefill_ms
    assert longer
    assert all(ms == shortest for _, ms in longer)
    assert any(note.startswith("prefill: 3 of 4 times came out under") for note in profile.notes)
    assert parse_profile(msgspec.json.encode(profile), "here") == profile


async def test_a_second_engine_shows_the_handoff(engine: ScriptedEngine) -> None:
    engine.script.token_interval_s = 1e-3
    async with ScriptedEngine() as decode:
        profile = await profile_of(engine, decode=decode)
        assert decode.pulls > 0
    assert profile.handoff_bytes_per_s != 100e9
    assert not any("handoff was not measured" in note for note in profile.notes)


async def test_a_neighbour_reads_prompts_all_the_while_and_it_is_noted(engine: ScriptedEngine) -> None:
    engine.script.token_interval_s = 1e-3
    async with ScriptedEngine() as beside:
        beside.script.prefill_s_per_token = 1e-5
        profile = await profile_of(engine, beside=beside)
        asked = [each.body["max_tokens"] for each in beside.recorded]
    assert len(asked) > 3
    assert set(asked) == {1}
    assert any(beside.url in note for note in profile.notes)


async def test_a_neighbour_that_does_not_answer_spoils_the_figures(engine: ScriptedEngine) -> None:
    engine.script.token_interval_s = 1e-3
    async with ScriptedEngine() as beside:
        beside.script.on_request = lambda recorded: Reply(status=503)
        with pytest.raises(UserError, match=beside.url):
            await profile_of(engine, beside=beside)


async def test_a_machine_whose_speed_wanders_is_seen_in_every_figure_and_named(engine: ScriptedEngine) -> None:
    """The second of three rounds is ten times as slow: no median is, and no figure was measured in that round alone."""
    seen: dict[int, int] = {}

    def answers(recorded: Recorded) -> Reply:
        words = len(str(recorded.body["messages"]).split())
        seen[words // 50] = seen.get(words // 50, 0) + (recorded.body["max_tokens"] == 1)
        is_slow = seen[words // 50] == 2
        return told(recorded.body["max_tokens"], first_s=0.1 if is_slow else 0.01, then_s=0.001, prompt_tokens=words)

    engine.script.on_request = answers
    profile = await profile_of(engine)
    assert max(ms for _, ms in profile.prefill_ms) < 100
    assert any(note.startswith("prefill: the rounds' times of the same work are") for note in profile.notes)


async def test_no_two_prompts_are_the_same(engine: ScriptedEngine) -> None:
    engine.script.token_interval_s = 1e-3
    await profile_of(engine)
    prompts = [str(each.body["messages"]) for each in engine.recorded]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (LIMITS._replace(sequences=1), "one sequence at a time"),
        (LIMITS._replace(context_tokens=130), "fewer than two lengths"),
        (LIMITS._replace(kv_tokens=150), "too few for 2 sequences"),
    ],
)
async def test_an_engine_that_cannot_be_measured(engine: ScriptedEngine, limits: Limits, why: str) -> None:
    engine.script.token_interval_s = 1e-3
    with pytest.raises(UserError, match=why):
        await profile_of(engine, limits)


async def test_an_engine_without_a_page_of_itself_says_nothing(engine: ScriptedEngine) -> None:
    pool = Pool()
    try:
        assert await engine_says(pool, target_of(engine.url)) == EngineSays()
    finally:
        await pool.close()


@pytest.mark.parametrize("extra_s", [0.0, 0.004])
def test_what_a_mixed_step_costs_extra_is_beyond_decode_and_chunk_whose_floor_counts_once(extra_s: float) -> None:
    floor_s, token_s, decode_s, chunks = 0.010, 0.001, 0.012, 4
    alone = [(256, floor_s + 256 * token_s), (512, 2 * floor_s + 512 * token_s), (1024, chunks * floor_s + 1024 * token_s)]
    alone[0:0] = [(64, floor_s + 64 * token_s), (128, floor_s + 128 * token_s)]
    read_s = chunks * (decode_s + 256 * token_s + extra_s)
    prompt = Mixed(1, 100, 1024, decode_s + read_s, chunks + 1)
    assert mixed_extra_ms([prompt], alone, {(1, 100): decode_s, (2, 100): 0.02}) == pytest.approx(extra_s * 1e3, abs=1e-9)
