import pytest
from tests.sim.plain import profile

from twinpool.sim.cost import StepCost
from twinpool.sim.shelf import load_profile

H100 = StepCost(load_profile("llama-3.1-70b-h100-tp8"))


def test_a_step_that_reads_one_prompt_is_the_profile_s_prefill() -> None:
    for tokens, ms in load_profile("llama-3.1-70b-h100-tp8").prefill_ms:
        assert H100.prefill(tokens, tokens**2) == pytest.approx(ms / 1e3)


def test_a_decode_step_is_the_profile_s_at_its_points_and_between_them_elsewhere() -> None:
    assert H100.decode(64, 64 * 2048) == pytest.approx(0.01375)
    assert H100.decode(96, 96 * 2048) == pytest.approx((0.01375 + 0.016334) / 2)
    assert 0.012062 < H100.decode(64, 64 * 1000) < 0.01375


def test_beyond_the_table_it_grows_on() -> None:
    assert H100.decode(256, 256 * 2048) > H100.decode(128, 128 * 2048) + 0.003
    assert H100.decode(64, 64 * 20_000) > H100.decode(64, 64 * 8192)


def test_a_chunk_beside_a_batch_costs_what_the_larger_products_take() -> None:
    added = H100.mixed(32, 32 * 1000, 512, 512**2) - H100.decode(32, 32 * 1000)
    assert added == pytest.approx(H100.prefill(544, 512**2) - H100.prefill(32, 0))
    assert added < H100.prefill(512, 512**2)


def test_a_prompt_in_chunks_attends_as_much_as_whole() -> None:
    whole = 4096**2
    chunks = [(done, 1024) for done in range(0, 4096, 1024)]
    assert sum(chunk * (chunk + 2 * done) for done, chunk in chunks) == whole


def test_the_extra_cost_of_a_mixed_step_is_added_to_mixed_steps_alone() -> None:
    plain, dear = StepCost(profile()), StepCost(profile(mixed_step_extra_ms=3.0))
    assert dear.mixed(2, 200, 50, 0.0) - plain.mixed(2, 200, 50, 0.0) == pytest.approx(0.003)
    assert dear.decode(2, 200) == plain.decode(2, 200)
    assert dear.prefill(50, 0.0) == plain.prefill(50, 0.0)


def test_a_curve_that_bends_upwards_takes_no_less_than_nothing_for_few_tokens() -> None:
    bent = StepCost(profile(prefill_ms=((64, 300.0), (128, 700.0), (256, 1500.0))))
    assert bent.linear(0) == bent.linear(1) == 0.0
    assert bent.mixed(1, 100, 63, 0.0) - bent.decode(1, 100) <= bent.linear(64)
