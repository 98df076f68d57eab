from pathlib import Path

import pytest

from twinpool.cli import worker_log
from twinpool.cli.worker_log import WorkerLog
from twinpool.errors import UserError


def test_lines_carry_their_worker_and_reach_the_disk_at_once(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "logs" / "serve.log")
    log.write("prefill-0", "loading")
    assert log.path.read_text().endswith(" prefill-0: loading\n")
    log.close()


def test_the_run_before_is_kept(tmp_path: Path) -> None:
    for text in ("first", "second"):
        log = WorkerLog(tmp_path / "serve.log")
        log.write("a", text)
        log.close()
    assert "second" in (tmp_path / "serve.log").read_text()
    assert "first" in (tmp_path / "serve.log.1").read_text()


def test_it_never_grows_beyond_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_log, "LARGEST_BYTES", 1000)
    log = WorkerLog(tmp_path / "serve.log")
    for number in range(1000):
        log.write("a", str(number))
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2200
    assert len(list(tmp_path.iterdir())) == 2


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write the log .*--log FILE"):
        WorkerLog(tmp_path / "file" / "serve.log")


def test_a_disk_that_fails_ends_the_log_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = WorkerLog(Path("/dev/full") if Path("/dev/full").exists() else tmp_path / "skip")
    log.write("a", "lost")
    log.write("a", "not even tried")
    log.close()
    assert capsys.readouterr().err.count("the log /dev/full ends here") == 1
