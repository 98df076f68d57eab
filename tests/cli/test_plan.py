import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from twinpool.cli.group import cli
from twinpool.sim import shelf
from twinpool.sim.shelf import load_profile

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments, "--profile", "llama-3.1-8b-h100-tp1", "--sample", "6"])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [f"2023-11-16 18:{n // 30:02}:{2 * n % 60:02}.0,{9000 + 37 * n % 900},{20 + n % 7}" for n in range(240)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEAD, *rows]))
    return str(path)


def test_a_plan_in_words_json_and_a_page(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    outcome = run(trace, "--workers", "2", "--json", "--html", str(page))
    assert outcome.exit_code == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    assert answer["recommendation"]
    assert {"prefill", "decode", "colocated", "balance", "goodput_req_s"} <= set(answer["options"][0])
    assert page.read_text().startswith("<!doctype html>")


def test_the_words_say_of_which_time_a_rate_is(trace: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    for said in (run(trace, "--workers", "2", "--html", str(page)).stdout, page.read_text()):
        assert "goodput is of its counted part" in " ".join(said.split())


def test_too_much_for_them_is_exit_1(trace: str) -> None:
    outcome = run(trace, "--workers", "2", "--rate-scale", "1000")
    assert outcome.exit_code == 1
    assert "No plan" in outcome.stdout
    assert "bound" in outcome.stdout


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (["2023-11-16 18:00:00.0,10,10"], "1 request is no traffic"),
        (["2023-11-16 18:00:00.0,10,10", "2023-11-16 17:00:00.0,10,10"], "sort it"),
        (["2023-11-16 18:00:00.0,ten,10"], "line 2"),
        ([], "no request"),
    ],
)
def test_a_trace_that_is_none_is_one_line_and_exit_2(rows: list[str], why: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEAD, *rows]))
    outcome = run(str(path), "--workers", "2")
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert why in outcome.stderr


def test_a_trace_of_which_too_little_fits_says_so(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:{n // 30:02}:{2 * n % 60:02}.0,{500 if n % 10 == 0 else 200_000},20" for n in range(240)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([HEAD, *rows]))
    outcome = run(str(path), "--workers", "2")
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert "only 24 of 240 requests fit" in outcome.stderr
    assert "context of 131,072 tokens" in outcome.stderr


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_tokens": -3000}, "the model does not fit"),
        ({"decode_step_ms": [[1, 512, 9.0], [1, 2048, 9.5], [64, 512, 12.0]]}, r"holes at (batch, context) (64, 2048)"),
    ],
)
def test_a_profile_that_cannot_be_planned_with_says_why(change: dict[str, Any], why: str, trace: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(msgspec.json.encode({**msgspec.to_builtins(load_profile("llama-3.1-8b-h100-tp1")), **change}).decode())
    outcome = CliRunner().invoke(cli, ["plan", trace, "--profile", str(path)])
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert why in outcome.stderr


def test_an_objective_out_of_reach_is_exit_1_and_says_which(trace: str) -> None:
    outcome = run(trace, "--workers", "2", "--slo-itl", "0.001")
    assert outcome.exit_code == 1
    assert "1 ms for a token are out of reach" in outcome.stdout
    assert "nothing was simulated" in outcome.stdout


def test_without_a_profile_those_of_the_package_are_named(trace: str) -> None:
    outcome = CliRunner().invoke(cli, ["plan", trace])
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert "llama-3.1-70b-h100-tp8" in outcome.stderr


def test_a_page_that_cannot_be_written_is_said_before_the_work(trace: str, tmp_path: Path) -> None:
    outcome = run(trace, "--html", str(tmp_path / "nowhere" / "plan.html"))
    assert outcome.exit_code == 2
    assert "no folder" in outcome.stderr


def test_a_file_that_is_empty_or_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("")
    assert "the trace is empty" in run(str(path)).stderr

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shelf, "trace", refuse)
    outcome = run(str(path))
    assert (outcome.exit_code, outcome.stderr) == (2, f"twinpool: cannot read {path}: Permission denied\n")
