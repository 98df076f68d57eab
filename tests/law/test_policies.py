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


def test_at_a_short_objective_the_law_carries_what_a_tuned_colocated_fleet_does_not(
    policies: ModuleType, tmp_path: Path
) -> None:
    cell = policies.Cell("tp8", "slice", 0.025)
    kept = policies.Kept(tmp_path / "plays.jsonl")
    law = kept.play(cell, policies.Way("law", 5, 3, 0, 8192), 1, 92.0, is_search=True)
    colocated = kept.play(cell, policies.Way("fixed", 0, 0, 8, 384), 1, 92.0, is_search=True)
    assert law.attainment_ratio >= 0.9 > colocated.attainment_ratio


def test_the_best_split_is_found_and_told(policies: ModuleType, tmp_path: Path) -> None:
    cell = policies.Cell("tp8", "slice", 0.05)
    found = policies.figure(cell, "static", 1, policies.Kept(tmp_path / "plays.jsonl"))
    assert (found.way.prefill, found.way.decode) == (6, 2)
    assert 0.8 * policies.bound_req_s(cell) < found.rate_req_s < policies.bound_req_s(cell)
    assert f"| {found.rate_req_s:.1f} (" in list(policies.table({(cell, "static"): found}, [cell], ["static"]))[-1]


def test_what_was_played_is_not_played_again(policies: ModuleType, tmp_path: Path) -> None:
    cell, way = policies.Cell("tp8", "slice", 0.025), policies.Way("fixed", 0, 0, 8, 384)
    played = policies.Kept(tmp_path / "plays.jsonl").play(cell, way, 1, 60.0, is_search=True)
    again = policies.Kept(tmp_path / "plays.jsonl")
    lines = (tmp_path / "plays.jsonl").read_text()
    assert again.play(cell, way, 1, 60.0, is_search=True) == played
    assert (tmp_path / "plays.jsonl").read_text() == lines
