"""docs/structure.md draws the lifecycles as they are."""

import re
from pathlib import Path
from typing import Any

import pytest

from twinpool.core.lifecycle import (
    ENDS,
    HANDLE_ENDS,
    HANDLE_TABLE,
    PAIR_TABLE,
    REQUEST_TABLE,
    WORKER_TABLE,
    HandleState,
    PairState,
    RequestState,
    WorkerState,
)

TEXT = (Path(__file__).parents[2] / "docs" / "structure.md").read_text(encoding="utf-8")
DRAWINGS = re.findall(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)

LIFECYCLES = [
    pytest.param(REQUEST_TABLE, RequestState.NEW, ENDS, id="request"),
    pytest.param(HANDLE_TABLE, HandleState.HELD, HANDLE_ENDS, id="handle"),
    pytest.param(WORKER_TABLE, WorkerState.READY, frozenset(), id="worker"),
    pytest.param(PAIR_TABLE, PairState.UNPROVED, frozenset(), id="pair"),
]


def test_there_is_a_drawing_of_each_lifecycle() -> None:
    assert len(DRAWINGS) == len(LIFECYCLES)


@pytest.mark.parametrize(("table", "start", "ends"), LIFECYCLES)
def test_the_drawing_is_the_table(table: dict[tuple[Any, Any], Any], start: Any, ends: frozenset[Any]) -> None:
    drawing = DRAWINGS[[parameters.values[0] for parameters in LIFECYCLES].index(table)]
    lines = sorted(line.strip() for line in drawing.splitlines())
    moves = [f"{before} --> {after}: {move}" for (before, move), after in table.items()]
    assert lines == sorted([f"[*] --> {start}", *moves, *(f"{end} --> [*]" for end in ends)])
