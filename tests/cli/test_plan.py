import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twinpool.cli.group import cli

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments, "--profile", "llama-3.1-8b-h100-tp1"])


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
