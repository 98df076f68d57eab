import pytest
from tests.policy.costs_of import learning

from twinpool.policy.capacity import Asked, Kind, carried, carried_by_one_pool


def kind(*, budget: int = 8192, kv: float | None = None, sequences: int = 256) -> dict[str, Kind]:
    costs = learning().costs.of("k")
    assert costs is not None
    return {"k": Kind(costs, kv, sequences, budget)}


def asked(*, reads: float, writes: float, context: float = 1000.0, short_share: float = 0.2) -> Asked:
    return Asked(
        reads=reads,
        squares=0.0,
        writes=writes,
        context=context,
        requests=reads / 1000,
        short_share=short_share,
        short_tokens=500.0,
        long_tokens=3000.0,
    )


def times(traffic: Asked, prefill: int, decode: int, kinds: dict[str, Kind] | None = None) -> float:
    return carried(traffic, kinds or kind(), {"k": prefill}, {"k": decode})


def test_prefill_alone_reads_what_it_can() -> None:
    """25,000 tokens a second each; what a decode worker reads beside long prompts is none."""
    assert times(asked(reads=50_000, writes=1, short_share=0.0), 2, 1) == pytest.approx(1.0, rel=0.01)


def test_decode_alone_writes_what_it_can() -> None:
    """At the limit of 45 ms a worker would write 350 at once, and has room for 256: 256 every 35.6 ms."""
    assert times(asked(reads=1, writes=256 / 0.0356), 1, 1) == pytest.approx(1.0, rel=0.02)


def test_kv_bounds_the_batch() -> None:
    assert times(asked(reads=1, writes=5000), 1, 1, kind(kv=50_000)) < 0.7


def test_a_decode_worker_with_time_left_reads_short_prompts_beside() -> None:
    none = times(asked(reads=50_000, writes=500, short_share=0.0), 1, 1)
    some = times(asked(reads=50_000, writes=500, short_share=0.5), 1, 1)
    assert some > 1.2 * none


def test_prompts_of_any_length_are_read_beside_where_the_budget_keeps_the_objective() -> None:
    long = asked(reads=50_000, writes=500, short_share=0.0)
    assert times(long, 1, 1, kind(budget=512)) > 1.2 * times(long, 1, 1, kind(budget=8192))


def test_a_missing_pool_carries_nothing() -> None:
    assert times(asked(reads=1000, writes=1000), 3, 0) == 0.0


def test_one_pool_needs_prompts_that_are_readable_beside() -> None:
    traffic = asked(reads=20_000, writes=2000, short_share=0.0)
    assert carried_by_one_pool(traffic, kind(budget=8192), {"k": 4}) < 0.01
    assert carried_by_one_pool(traffic, kind(budget=512), {"k": 4}) > 1.0


def test_what_is_carried_does_not_hang_on_rounding() -> None:
    found = [
        carried_by_one_pool(asked(reads=20_000 * (1 + n * 1e-12), writes=2000, short_share=0.0), kind(budget=512), {"k": 3})
        for n in range(50)
    ]
    assert max(found) - min(found) < 0.01


def test_nothing_asked_is_carried_any_number_of_times() -> None:
    assert times(asked(reads=0, writes=0), 1, 1) >= 1e6


def test_a_budget_that_ends_steps_early_makes_more_of_them() -> None:
    """512 tokens, 32 of them written: 10 + 3.2 + 19.2 ms, 30.8 times a second, though 45 ms would keep the objective."""
    traffic = asked(reads=30.84 * 479.6, writes=1000, short_share=0.0)
    assert carried_by_one_pool(traffic, kind(budget=512), {"k": 1}) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("workers", range(1, 12))
def test_one_pool_carries_what_its_workers_do_however_many_share_it(workers: int) -> None:
    """Eight eighths may sum to a little less than one: that is no prompt unread."""
    for reads in (10_000.0, 12_345.678, 13_999.9):
        traffic = asked(reads=workers * reads, writes=1000.0 * workers, short_share=0.0)
        found = carried_by_one_pool(traffic, kind(budget=512), {"k": workers})
        assert found > 1.0
