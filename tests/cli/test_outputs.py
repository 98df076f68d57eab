import os
from pathlib import Path

import pytest

from twinpool.cli.outputs import check_writable, write_file
from twinpool.errors import UserError


def test_trying_leaves_nothing_and_takes_nothing(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("kept")
    check_writable(json=str(tmp_path / "new"), html=old)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert old.read_text() == "kept"


def test_what_cannot_be_written_is_found_before(tmp_path: Path) -> None:
    for where, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "x", "there is no folder"), ("x" * 300, "too long")):
        with pytest.raises(UserError, match=why) as raised:
            check_writable(out=where)
        assert "--out" in str(raised.value)


def test_two_options_do_not_share_a_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "one")
    with pytest.raises(UserError, match="--json and --html are the same file"):
        check_writable(json=str(tmp_path / "one"), html=str(tmp_path / "link"))
    check_writable(json="/dev/null", html="/dev/null")
    check_writable(json="-", html="-")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "report", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, "after", "--json")
    assert (path.read_text(), path.stat().st_mode & 0o777, link.is_symlink()) == ("after", 0o640, True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match="no space left"):
        write_file(path, "never", "--json")
    assert path.read_text() == "after"
    assert sorted(os.listdir(tmp_path)) == ["link", "report"]
