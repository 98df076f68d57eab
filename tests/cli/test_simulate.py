import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from twinpool.cli.group import cli

SMALL = """
name = "small"
duration_s = 20
[traffic]
mix = "mixed-60-40"
arrivals = {shape = "burst", rate = 10, starts_s = 5, lasts_s = 5}
[[arms]]
name = "one"
workers = [{count = 2, role = "colocated", profile = "llama-3.1-8b-h100-tp1"}]
[[arms]]
name = "two"
workers = [
  {count = 1, role = "prefill", profile = "llama-3.1-8b-h100-tp1"},
  {count = 1, role = "decode", profile = "llama-3.1-8b-h100-tp1"},
]
[[claims]]
what = "twice as fast"
claimed = 0.5
arm = "two"
over = "one"
key = "ttft_s.mean"
[[faults]]
at_s = 8
worker = "w001"
kind = "crash"
lasts_s = 3
"""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments])


def test_without_a_name_the_gallery() -> None:
    assert "article" in run().stdout
    assert run("--list").stdout == run().stdout
    assert "article" in json.loads(run("--json").stdout)["gallery"]


def test_every_arm_and_what_is_claimed_beside_what_is_found(small: str) -> None:
    said = run(small).stdout
    assert "twice as fast" in said
    assert "no policy could exceed" in said
    assert "offered and goodput are of the counted time" in said
    assert all(f"\n{arm}" in said for arm in ("one", "two"))


def test_json_is_one_object_and_nothing_else(small: str) -> None:
    answer = json.loads(run(small, "--json").stdout)
    two = answer["arms"]["two"]
    assert two["goodput_req_s"] <= two["bound_req_s"]
    assert answer["claims"][0]["found"] == pytest.approx(two["ttft_s"]["mean"] / answer["arms"]["one"]["ttft_s"]["mean"])


def test_objectives_and_rate_from_the_command_line(small: str) -> None:
    base, strict = (json.loads(run(small, "--json", *more).stdout) for more in ((), ("--slo-ttft", "0.02")))
    assert strict["arms"]["one"]["goodput_req_s"] < base["arms"]["one"]["goodput_req_s"]
    twice = json.loads(run(small, "--json", "--rate-scale", "2").stdout)
    assert twice["arms"]["one"]["offered_req_s"] > 1.5 * base["arms"]["one"]["offered_req_s"]


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    for given in (str(path), "no-such"):
        outcome = run(given)
        assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)


LAW = """
[routing]
policy = "least_cost"
[balance]
mode = "auto"
"""

SUMS = {
    "until 3.11": "reduce(add, values, start)",
    "since 3.12": "fsum([start, *values]) if any(isinstance(value, float) for value in values) else plain(values, start)",
}
"""How Python adds floats in `sum`: one after the other, or with what is lost on the way, which is as good as exactly."""


def output(scenario: str, *, hash_seed: str = "0", adds: str | None = None) -> bytes:
    """What comes out, by a Python that adds like that."""
    program = "from twinpool.__main__ import main\nmain()"
    if adds is not None:
        program = f"""
import builtins
from functools import reduce
from math import fsum
from operator import add
plain = sum
def like(values, /, start=0):
    values = list(values)
    return {adds}
builtins.sum = like
{program}"""
    command = [sys.executable, "-c", program, "simulate", scenario, "--json"]
    return subprocess.run(command, capture_output=True, check=True, timeout=60, env={"PYTHONHASHSEED": hash_seed}).stdout


def test_the_same_bytes_under_any_hash_seed(small: str) -> None:
    assert output(small, hash_seed="1") == output(small, hash_seed="2")


def test_the_same_bytes_by_whatever_version_of_python(tmp_path: Path) -> None:
    path = tmp_path / "law.toml"
    path.write_text(SMALL + LAW)
    assert len({output(str(path), adds=adds) for adds in (None, *SUMS.values())}) == 1
