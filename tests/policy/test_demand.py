"""What is asked for: of prompts whose beginnings are shared, what must be read anew."""

import pytest

from twinpool.policy.demand import Demand


def test_what_workers_hold_already_is_not_asked_for() -> None:
    some, none = Demand(1500), Demand(1500)
    for n in range(200):
        for demand in (some, none):
            demand.arrived(0.05 * n, 4000)
        some.reused(1000, 3000)
    shared, plain = some.asked(10.0), none.asked(10.0)
    assert shared.reads == pytest.approx(plain.reads / 4)
    assert shared.squares == pytest.approx(plain.squares * (1000 * 7000) / 4000**2)
    assert shared.long_tokens == pytest.approx(1000.0)
    assert shared.writes == plain.writes
    assert shared.context == plain.context


def test_classes_share_apart() -> None:
    demand = Demand(1500)
    demand.arrived(0.0, 1000)
    demand.arrived(0.1, 4000)
    demand.reused(0, 4000)
    found = demand.asked(1.0)
    assert found.short_share == pytest.approx(1.0)
    assert found.long_tokens == pytest.approx(0.0)
