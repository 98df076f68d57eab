from pathlib import Path

import pytest
from click.testing import CliRunner

from twinpool.cli.group import cli


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(cli, ["profile", "http://127.0.0.1:1", "--out", str(tmp_path / "p.json")])
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert "nobody answers" in outcome.stderr
    assert not (tmp_path / "p.json").exists()


def test_the_file_to_write_is_asked_for() -> None:
    outcome = CliRunner().invoke(cli, ["profile", "http://127.0.0.1:1"])
    assert outcome.exit_code == 2
    assert "--out" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "either the URL"),
        (("http://127.0.0.1:1", "--from-aiconfigurator", "m"), "either the URL"),
        (("--from-aiconfigurator", "m"), "--system h100_sxm"),
        (("--from-aiconfigurator", "m", "--system", "s", "--decode", "http://127.0.0.1:1"), "live engine"),
    ],
)
def test_what_is_asked_for_is_one_of_two(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(cli, ["profile", *arguments, "--out", str(tmp_path / "p.json")])
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (2, 1)
    assert why in outcome.stderr
