"""A slice of `benchmarks/policies.py`: the same search, on seconds of one traffic."""

from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import policies as module

    return module


def test_at_a_short_objective_the_law_carries_more_than_a_tuned_colocated_fleet(policies: ModuleType, tmp_path: Path) -> None:
    cell = policies.Cell("tp8", "slice", 0.025)
    kept = policies.Kept(tmp_path / "plays.jsonl")
    law, colocated = (policies.figure(cell, arm, 1, kept) for arm in ("law", "colocated"))
    assert 1.05 * colocated.rate_req_s < law.rate_req_s < 1.05 * policies.bound_req_s(cell)
    rows = list(policies.table({(cell, "law"): law, (cell, "colocated"): colocated}, [cell], ["law", "colocated"]))
    assert f"{law.rate_req_s:.1f}" in rows[-1]


def test_what_was_played_is_not_played_again(policies: ModuleType, tmp_path: Path) -> None:
    cell, way = policies.Cell("tp8", "slice", 0.025), policies.Way("fixed", 0, 0, 8, 384)
    played = policies.Kept(tmp_path / "plays.jsonl").play(cell, way, 1, 60.0, is_search=True)
    again = policies.Kept(tmp_path / "plays.jsonl")
    lines = (tmp_path / "plays.jsonl").read_text()
    assert again.play(cell, way, 1, 60.0, is_search=True) == played
    assert (tmp_path / "plays.jsonl").read_text() == lines
