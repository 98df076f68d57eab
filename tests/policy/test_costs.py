"""What a kind of worker takes, before anything was seen of it and after."""

import msgspec
import pytest
from tests.policy.costs_of import PRIOR, learning

from twinpool.core.meters import ReadingSeen, WritingSeen
from twinpool.policy.costs import Costs, KindCosts
from twinpool.policy.priors import prior_of
from twinpool.sim.cost import StepCost
from twinpool.sim.shelf import load_profile


def costs(**prior: float) -> KindCosts:
    found = Costs({"": msgspec.structs.replace(PRIOR, **prior)}, 0.05).of("any")
    assert found is not None
    return found


def test_a_step_on_its_floor_takes_tokens_for_nothing_the_fewer_the_more_it_writes() -> None:
    kind = costs(free_tokens=100.0, free_sequence_tokens=0.5)
    assert kind.added(0, 80) == 0.0
    assert kind.added(0, 200) == pytest.approx(0.004)
    assert kind.added(100, 200) == pytest.approx(0.006)
    assert kind.added(200, 200) == kind.added(400, 200) == pytest.approx(0.008)


@pytest.mark.parametrize("batch", [0.0, 50.0, 400.0])
def test_the_largest_chunk_fills_the_limit(batch: float) -> None:
    kind = costs(free_tokens=100.0, free_sequence_tokens=0.5, mixed_s=0.001)
    step_s = kind.step(batch, 0)
    chunk = kind.largest_chunk(batch, step_s, 0.07)
    assert step_s + kind.added(batch, chunk) == pytest.approx(0.07)


@pytest.mark.parametrize("name", ["llama-3.1-70b-h100-tp8", "llama-3.1-70b-h100-tp4", "llama-3.1-8b-h100-tp1"])
@pytest.mark.parametrize("batch", [64, 128, 200])
@pytest.mark.parametrize("budget", [512, 1024])
def test_a_profile_foretells_the_longest_mixed_steps(name: str, batch: int, budget: int) -> None:
    """As the simulation plays them, with formulas of its own: those steps are what an ITL objective hangs on."""
    profile = load_profile(name)
    kind = Costs({"": prior_of(profile, budget)}, 0.05).of("any")
    assert kind is not None
    kv, chunk = 1300 * batch, budget - batch
    truth = StepCost(profile).mixed(batch, kv, chunk, chunk * chunk)
    assert kind.step(batch, kv, chunk) == pytest.approx(truth, rel=0.045)


@pytest.mark.parametrize("ms", [1e-3, 10.0, 1e7])
def test_where_length_costs_nothing_a_token_beside_writing_costs_nothing(ms: float) -> None:
    base = load_profile("llama-3.1-70b-h100-tp8")
    flat = msgspec.structs.replace(base, prefill_ms=tuple((tokens, ms) for tokens, _ in base.prefill_ms))
    kind = Costs({"": prior_of(flat, 512)}, 0.05).of("any")
    assert kind is not None
    assert kind.read(512, 0) == pytest.approx(ms / 1e3, rel=1e-4)
    assert kind.step(8, 8000, 400) >= kind.step(8, 8000)


def test_the_errors_of_what_was_predicted_are_told_by_kind() -> None:
    learnt = learning()
    assert learnt.errors() == {}
    for _ in range(20):
        learnt.read("slow", ReadingSeen(1, 1, 1000, 1e6, 0.06))
    learnt.wrote("quick", WritingSeen(1.0, 10.0, 0.0, 0), 100)
    assert set(learnt.errors()) == {"slow", "quick"}
    assert set(learnt.errors()["quick"]) == {"step"}
    at_first = learnt.errors()["slow"]["reading"]
    assert at_first > 0.1, "a third less than it took"
    for _ in range(2000):
        learnt.read("slow", ReadingSeen(1, 1, 1000, 1e6, 0.06))
    assert learnt.errors()["slow"]["reading"] < 0.5 * at_first, "it learns"


@pytest.mark.parametrize("count", range(16, 36))
def test_what_is_remembered_goes_on_as_it_would_have_at_any_moment(count: int) -> None:
    """Also between two renewals of the estimates."""
    one, other = Costs({}, 0.05), Costs({}, 0.05)
    for n in range(count):
        one.wrote("k", WritingSeen(1.0, 1.0 + n, 4000.0, 0), 100)
        one.read("k", ReadingSeen(1, 1 + n % 3, 1000 + n, 1e6, 0.1))
    other.recall(one.remember())
    found, expected = other.of("k"), one.of("k")
    assert found is not None
    assert expected is not None
    assert vars(found) == vars(expected)
