import os
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from twinpool.cli import status
from twinpool.cli.group import cli

TWINPOOL = f"{sys.executable} -m twinpool"


def shell(script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("ours"), 70, "Traceback"),
        (FileNotFoundError(2, "No such file", "ours"), 70, "Traceback"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_is_no_verdict_has_no_verdict_s_code(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, said: str
) -> None:
    def fetch(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(status, "fetch_state", fetch)
    outcome = CliRunner().invoke(cli, ["status"])
    assert outcome.exit_code == code
    assert said in outcome.stderr
    assert outcome.stderr.strip() == "" or said


def test_a_reader_that_went_away_hears_nothing_more() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        command = [*TWINPOOL.split(), "simulate", "--list"]
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_rich_table_without_a_reader_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any) -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            sys.exit(1)  # as rich's Console does

    monkeypatch.setattr(status, "fetch_state", fetch)
    assert CliRunner().invoke(cli, ["status"]).exit_code == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_a_full_disk_is_one_line() -> None:
    done = shell(f"{TWINPOOL} simulate --list >/dev/full")
    assert (done.returncode, done.stderr) == (2, "twinpool: cannot write standard output: no space left on device\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_a_closed_stream_ends_nothing(closed: str) -> None:
    done = shell(f"{TWINPOOL} profile http://127.0.0.1:1 --out /dev/null {closed}")
    assert done.returncode == 2
    assert "nobody answers" in done.stderr
