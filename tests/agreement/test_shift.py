"""Traffic turns from long prompts to long answers and back: the pools follow, nothing fails, and the predictions hold.

The modes of balance play the same requests; they differ in what they do and in nothing else.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from tests.agreement.shifted import Shifted

from twinpool.assemble import replay

ROOT = Path(__file__).parents[2]
MODES = ("off", "advise", "auto")


class Run:
    def __init__(self, mode: str, folder: Path) -> None:
        journal = folder / mode
        command = [sys.executable, "-m", "tests.agreement.shift", mode, str(journal)]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=600)
        assert done.returncode == 0, done.stderr.decode()
        self.seen = msgspec.json.decode(done.stdout, type=Shifted)
        self.journal = journal.read_bytes().splitlines(keepends=True)

    def records(self) -> set[str]:
        steps = [json.loads(line) for line in self.journal[1:]]
        return {step["event"]["type"] for step in steps} | {command["type"] for step in steps for command in step["commands"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("shift")
    return {mode: Run(mode, folder) for mode in MODES}


pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("mode", MODES)
def test_no_request_fails_or_changes_its_text(runs: dict[str, Run], mode: str) -> None:
    answers = runs[mode].seen.answers
    assert len(answers) > 400
    assert [answer for answer in answers if answer.status != 200 or not answer.is_right] == []


def splits(run: Run, start_s: float, end_s: float) -> list[tuple[int, int]]:
    return [(split.prefill, split.decode) for split in run.seen.splits if start_s <= split.at_s < end_s]


def test_the_pools_follow(runs: dict[str, Run]) -> None:
    """Within ten seconds of the costs being known, and of each turn."""
    auto = runs["auto"]
    assert set(splits(auto, 30, 60)) == {(2, 1)}
    assert (1, 2) in splits(auto, 60, 75)
    assert set(splits(auto, 90, 120)) == {(1, 2)}
    assert (2, 1) in splits(auto, 120, 135)
    moved = [found for found in auto.seen.balance if found["outcome"] == "did"]
    assert moved
    assert all(found["words"].startswith(("moved ", "everybody does everything")) for found in moved)


def predictions(run: Run) -> list[tuple[float, float]]:
    """Predicted and real, of the ways that requests went."""
    went = [each for each in run.seen.decisions if each["choice"] != "wait"]
    return [(e["predicted_ttft_s"], e["ttft_s"]) for e in went if e["predicted_ttft_s"] is not None and e["ttft_s"]]


def test_the_predictions_hold(runs: dict[str, Run], capsys: pytest.CaptureFixture[str]) -> None:
    found = predictions(runs["auto"])
    error = median(abs(predicted_s - real_s) / real_s for predicted_s, real_s in found)
    regret_s = runs["auto"].seen.regret_s
    with capsys.disabled():
        sys.stdout.write(f"\nTTFT, predicted against real: median error {error:.1%} of {len(found)}; regret {regret_s:.2f} s\n")
    assert len(found) > 300
    assert error < 0.2
    assert regret_s >= 0


def test_off_and_advice_move_nobody_and_predict_nothing(runs: dict[str, Run]) -> None:
    for mode in ("off", "advise"):
        assert set(splits(runs[mode], 0, 180)) == {(1, 2)}
        assert predictions(runs[mode]) == []
    assert runs["off"].seen.balance == []
    would = [found for found in runs["advise"].seen.balance if found["outcome"] == "would_do"]
    assert any(found["why"] == "prefill_short" for found in would)


def test_advice_is_in_the_journal_once_as_long_as_it_stays_the_same(runs: dict[str, Run]) -> None:
    said = [
        (command["balanced"]["why"], command["balanced"].get("role"))
        for line in runs["advise"].journal[1:]
        for command in json.loads(line)["commands"]
        if command["type"] == "RecordBalance"
    ]
    assert said
    assert all(one != other for one, other in pairwise(said))


def test_the_modes_write_the_same_journal_and_export_the_same_metrics(runs: dict[str, Run]) -> None:
    assert runs["off"].seen.metrics == runs["advise"].seen.metrics == runs["auto"].seen.metrics
    off = runs["off"].records()
    assert runs["advise"].records() - off <= {"RecordBalance", "TimePassed"}
    assert runs["auto"].records() - off <= {"RecordBalance", "RecordRole", "TimePassed", "SendWhole"}
    headers: list[dict[str, Any]] = [json.loads(runs[mode].journal[0]) for mode in MODES]
    assert len({tuple(header) for header in headers}) == 1
    for mode in MODES:
        replayed = replay(runs[mode].journal)
        assert replayed.difference is None
        assert replayed.events == len(runs[mode].journal) - 1
