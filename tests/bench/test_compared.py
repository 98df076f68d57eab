"""What follows from the rounds of a comparison. The rounds are made up here; how they are played is tested live."""

from random import Random
from typing import Any

import pytest

from twinpool.bench.arms import ARMS, Split, Workers, splits
from twinpool.bench.compare import order, role_changes
from twinpool.bench.compared import Found, Settings, recommendation, summary
from twinpool.bench.load import Generator
from twinpool.bench.pages import compare_page
from twinpool.bench.run import Measured
from twinpool.bench.series import Series
from twinpool.bench.tune import Burst, best
from twinpool.config import Objectives
from twinpool.engines.scripted import ScriptedEngine
from twinpool.http1 import Pool
from twinpool.measure.blocks import Recorder, Window
from twinpool.measure.sample import Sample
from twinpool.workload.mixes import MIXES

FEW = "whatever is said here, nothing is sure of so few."
SETTINGS = Settings(mix="mixed-60-40", traffic=MIXES["mixed-60-40"])
WORKERS = Workers(("http://a:1", "http://b:1", "http://c:1"), ("0", "1", "0"))


def played(
    seed: int,
    *,
    ttft: float = 1.0,
    stall_s: float = 0.03,
    failing: int = 0,
    requests: int = 300,
    workers: tuple[str, ...] = ("a", "b", "c"),
) -> Measured:
    """A round of 300 requests: `ttft` slows all first tokens, `stall_s` is each stream's worst gap."""
    rng = Random(seed)
    recorder = Recorder(Window.of(100.0), Objectives())
    for number in range(requests):
        is_long = number % 5 < 2
        recorder.add(
            Sample(
                meant_at_s=number / 3,
                is_long=is_long,
                prompt_tokens=3000 if is_long else 500,
                output_tokens=11,
                ttft_s=ttft * rng.uniform(0.5, 1.0) * (2.0 if is_long else 1.0),
                e2e_s=3.0,
                gaps_s=[0.02] * 9 + [stall_s * rng.uniform(0.9, 1.1)],
                failure="refused" if number < failing else None,
            )
        )
    return Measured(recorder, Series(100.0), Generator(sent=300, workers=dict.fromkeys(workers, 100)), [])


def compared(**arms: dict[str, Any]) -> dict[str, Any]:
    found = Found(
        scale=10.0, rate=3.0, duration_s=100.0, batch_tokens=128, split=Split(1, 2), tuning=["colocated: 2 requests/s"]
    )
    for arm in ARMS:
        found.rounds[arm] = [played(seed, **arms.get(arm, {})) for seed in (1, 2)]
    return summary(SETTINGS, found, WORKERS)


def test_few_requests_are_sure_of_nothing_and_many_need_no_such_word() -> None:
    few = compared(balanced={"requests": 36})  # of a round; the first thirty come in its warm-up
    assert few["recommendation"] == "unknown"
    assert few["words"][-1].startswith("What this traffic wants cannot be told: ")
    assert few["words"][0] == f"Only {few['arms']['balanced']['requests']} requests were counted in an arm: {FEW}"
    assert not any(FEW in line for line in compared()["words"])


def test_it_has_the_keys_of_the_contract() -> None:
    result = compared()
    assert set(result["arms"]) == {"colocated", "disaggregated", "balanced"}
    wanted = {"throughput_ratio", "goodput_ratio", "ttft_mean_ratio", "ttft_long_mean_ratio", "itl_worst_p99_ratio"}
    assert wanted <= set(result["change"])
    assert wanted <= set(result["change"]["intervals"])
    assert {"requests", "failed", "ttft_s", "itl_worst_s", "stalled_time_ratio", "long", "verdict"} <= set(
        result["arms"]["balanced"]
    )


def test_arms_that_do_the_same_are_the_same_and_one_pool_is_simpler() -> None:
    result = compared()
    assert result["change"]["ttft_mean_ratio"] == 1.0
    assert result["recommendation"] == "colocated"
    assert "not settled: goodput (" in result["words"][0]
    assert "no change" not in result["words"][0].replace("(no change)", "")
    assert not any("stood still" in line for line in result["words"])


def test_streams_that_stood_still_for_longer_are_mentioned() -> None:
    result = compared(disaggregated={"stall_s": 2.0})
    [line] = [line for line in result["words"] if "stood still" in line]
    share = result["arms"]["disaggregated"]["stalled_time_ratio"]
    assert line.startswith(f"Its streams stood still for {share:.0%} of their time")


def test_whether_anything_moved_is_told_of_the_balanced_arm() -> None:
    result = compared()
    assert result["arms"]["balanced"]["role_changes"] == 0
    assert "role_changes" not in result["arms"]["disaggregated"]


def test_calmer_streams_at_the_same_goodput_are_worth_having() -> None:
    result = compared(colocated={"stall_s": 0.4}, disaggregated={"stall_s": 0.1}, balanced={"stall_s": 0.2})
    assert result["changes"]["disaggregated"]["itl_worst_p99_ratio"] == pytest.approx(0.25, rel=0.1)
    low, high = result["changes"]["disaggregated"]["intervals"]["itl_worst_p99_ratio"]
    assert low <= 0.25 <= high < 1
    assert result["recommendation"] == "disaggregated"
    assert "helped the worst gaps (p99) -75 %" in " ".join(result["words"])


def test_calm_that_costs_ttft_is_said_and_not_recommended() -> None:
    result = compared(colocated={"stall_s": 0.4}, disaggregated={"stall_s": 0.1, "ttft": 3.0}, balanced={"stall_s": 0.4})
    assert "cost" in result["words"][0]
    assert "mean TTFT" in result["words"][0]
    assert result["recommendation"] == "colocated"


def test_more_goodput_wins() -> None:
    result = compared(colocated={"ttft": 1.2}, balanced={"ttft": 0.6})
    assert result["recommendation"] == "balanced"
    assert result["change"]["intervals"]["goodput_ratio"][0] > 1


async def test_role_changes_are_counted_over_pools_and_reasons(engine: ScriptedEngine) -> None:
    pool = Pool()
    assert await role_changes(pool, engine.url) == 0
    engine.script.metrics = {
        'twinpool_role_changes_total|to="decode"': 2.0,
        'twinpool_role_changes_total|to="prefill"': 1.0,
    }
    assert await role_changes(pool, engine.url) == 3
    await pool.close()


def test_failures_are_in_the_words_and_in_the_table() -> None:
    result = compared(balanced={"failing": 50})
    assert "Failed: " in " ".join(result["words"])
    [row] = [row for row in result["table"]["rows"] if row[0] == "failed"]
    assert row[1:3] == ["0", "0"]
    assert int(row[3]) > 0


def test_rates_are_of_all_workers_and_the_pools_stand_beside_them() -> None:
    """BM-08: a figure a worker that is divided by one pool alone flatters."""
    result = compared()
    arm = result["arms"]["disaggregated"]
    assert arm["throughput_output_tok_s_per_worker"] == pytest.approx(arm["throughput_output_tok_s"] / 3)
    assert arm["workers"] == {"prefill": 1, "decode": 2, "colocated": 0}
    assert result["arms"]["colocated"]["workers"] == {"prefill": 0, "decode": 0, "colocated": 3}
    assert any(row[0] == "prefill + decode + colocated" for row in result["table"]["rows"])


def test_the_rules_are_told() -> None:
    """BM-12."""
    said = " ".join(compared()["fairness"])
    for rule in (
        "The same 3 workers, started with the same flags, serve every arm",
        "3 workers on 2 cores, so some share a core: they are oversubscribed 1.5 times",
        "Colocated got its best batch size of 128, 256, 512 tokens a step: 128",
        "Disaggregated got 1:2 (prefill:decode), the best of all splits",
        "the same requests at the same times",
        "divided by 10",
    ):
        assert rule in said


def test_a_worker_that_got_nothing_is_named() -> None:
    """BM-13."""
    result = compared(balanced={"workers": ("a", "b")})
    assert "balanced: 1 of 3 workers got no request" in result["warnings"]
    assert not any("colocated: 1 of 3" in warning for warning in result["warnings"])


def test_too_few_long_requests_are_told() -> None:
    found = Found(scale=1.0, rate=1.0, duration_s=100.0, split=Split(1, 2))
    for arm in ARMS:
        found.rounds[arm] = [Measured(Recorder(Window.of(100.0), Objectives()), Series(100.0), Generator(), [])]
    assert "balanced: 0 long requests were counted, under 60" in summary(SETTINGS, found, WORKERS)["warnings"]


def test_each_arm_begins_a_round_and_every_round_has_all() -> None:
    rounds = [order(number) for number in range(3)]
    assert {one[0] for one in rounds} == set(ARMS)
    assert all(set(one) == set(ARMS) for one in rounds)


def test_all_splits_are_tried() -> None:
    assert list(map(str, splits(4))) == ["1:3", "2:2", "3:1"]


@pytest.mark.parametrize(
    ("bursts", "name"),
    [
        ({128: (1.0, 0.5), 512: (1.05, 2.0)}, 128),  # as quick within a tenth, and calmer
        ({128: (0.8, 0.5), 512: (1.0, 2.0)}, 512),
        ({128: (1.0, 0.5, 3), 512: (0.5, 2.0)}, 512),  # what fails requests is no candidate
    ],
)
def test_the_best_candidate_is_quick_and_then_calm(bursts: dict[int, tuple[Any, ...]], name: int) -> None:
    assert best({key: Burst(*value) if len(value) == 3 else Burst(*value, 0) for key, value in bursts.items()}) == name


def test_what_is_not_sure_is_not_recommended() -> None:
    unsure = {"goodput_ratio": 1.3, "itl_worst_p99_ratio": 0.5, "ttft_mean_ratio": 0.9}
    intervals = {key: [0.8, 1.8] for key in unsure}
    assert recommendation({"balanced": {**unsure, "intervals": intervals}})[0] == "colocated"


def test_calm_that_surely_costs_goodput_is_not_called_no_gain() -> None:
    found = {"goodput_ratio": 0.3, "itl_worst_p99_ratio": 0.2, "ttft_mean_ratio": 1.0}
    intervals = {key: [value * 0.9, value * 1.1] for key, value in found.items()}
    arm, why = recommendation({"balanced": {**found, "intervals": intervals}})
    assert (arm, why) == ("colocated", "more of its requests met the objectives, for sure")


def test_the_page_is_written() -> None:
    page = compare_page(compared())
    assert "The arms" in page
    assert page.count("<canvas") == 3
