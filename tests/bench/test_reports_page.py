"""docs/reports.md names every key that is written."""

import inspect
import re
from pathlib import Path

import pytest

from twinpool.bench.answer import Failed
from twinpool.bench.check import result_of
from twinpool.bench.compared import summary
from twinpool.bench.load import Generator
from twinpool.measure.interference import Interference
from twinpool.measure.report import Figures, Report
from twinpool.sim.findings import Findings

TEXT = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")


def keys_in(function: object) -> set[str]:
    """Of the dictionaries that it writes."""
    return set(re.findall(r'^ +"(\w+)":', inspect.getsource(function), re.MULTILINE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "keys",
    [
        *(set(of.__struct_fields__) for of in (Figures, Report, Generator, Interference, Findings)),
        set(Failed),
        keys_in(result_of),
        keys_in(summary),
    ],
)
def test_every_key_is_named(keys: set[str]) -> None:
    assert len(keys) > 6
    assert [key for key in sorted(keys - {"report"}) if f"`{key}`" not in TEXT] == []  # a simulation's report is on top
