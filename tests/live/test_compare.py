"""``twinpool compare`` as people run it, on engines of known timings: one prompt at a time, streams that nothing disturbs."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.live.scripted_process import scripted_process
from tests.live.service import run


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    with ExitStack() as stack:
        script = {"token_interval_s": 0.01, "prefill_s_per_token": 0.0005, "is_embedded": True}
        yield [stack.enter_context(scripted_process(**script)) for _ in range(3)]


@pytest.mark.timeout(300)
def test_three_arms_in_alternating_rounds(engines: list[str], tmp_path: Path) -> None:
    given = [option for url in engines for option in ("--engine", url)]
    load = ("--rate", "8", "--duration", "4", "--rounds", "2", "--scale-lengths", "20")
    out = tmp_path / "out.json"
    found = run("compare", *given, *load, "--json", str(out), "--html", str(tmp_path / "out.html"), timeout_s=280)
    assert found.returncode == 0, found.stderr
    result = json.loads(out.read_text())
    assert set(result["arms"]) == {"colocated", "disaggregated", "balanced"}
    counted = {arm["requests"] for arm in result["arms"].values()}
    assert len(counted) == 1, "every arm gets the same requests"
    assert all(arm["failed"] == 0 for arm in result["arms"].values()), found.stdout
    split = result["arms"]["disaggregated"]["workers"]
    assert (split["prefill"] + split["decode"], split["colocated"]) == (3, 0)
    assert len(result["arms"]["colocated"]["requests_by_worker"]) == 3
    assert set(result["change"]["intervals"]) >= {"throughput_ratio", "itl_worst_p99_ratio"}
    assert result["recommendation"] in result["arms"]
    assert isinstance(result["arms"]["balanced"]["role_changes"], int), "the gateway counts them"
    order = [line.rpartition(": ")[2] for line in found.stdout.splitlines() if "round " in line and " of 2: " in line]
    assert order == ["colocated", "disaggregated", "balanced", "balanced", "colocated", "disaggregated"]
    assert "This traffic wants" in found.stdout
    assert "<canvas" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--engine", "a:1"), "at least 2 workers"),
        (("--engine", "a:1", "--engine", "b:1", "--workers", "3"), "give one"),
        (("--split", "2:2"), "is not of 3 workers"),
        (("--split", "half"), "write P:D"),
        (("--mix", "blend"), "no such mix: blend"),
        (("--html", "/no/such/folder/x.html"), "there is no folder"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    found = run("compare", *arguments)
    assert found.returncode == 2
    assert says in found.stderr
    assert found.stderr.count("\n") == 1
