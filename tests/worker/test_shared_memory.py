"""Files in shared memory: private, gone with their process, moved only to who proves to be here."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinpool.errors import UserError
from twinpool.worker.shared_memory import KvFolder, sweep

A, B = "a" * 32, "b" * 32


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[KvFolder, KvFolder]]:
    one, other = KvFolder(A, tmp_path), KvFolder(B, tmp_path)
    yield one, other
    one.close()
    other.close()


def test_everything_is_private_and_removed(tmp_path: Path) -> None:
    folder = KvFolder(A, tmp_path)
    users = folder.path.parent
    assert users.name == f"twinpool-{os.getuid()}"
    assert [path.stat().st_mode & 0o777 for path in (users, folder.path)] == [0o700, 0o700]
    folder.file("x.kv").write_bytes(b"kv")
    folder.close()
    assert list(users.iterdir()) == []


def test_a_file_moves_to_who_shows_the_marker(two: tuple[KvFolder, KvFolder]) -> None:
    one, other = two
    one.file("x.kv").write_bytes(b"kv")
    assert one.give("x.kv", other.name, other.marker)
    assert other.file("x.kv").read_bytes() == b"kv"
    assert not one.file("x.kv").exists()


@pytest.mark.parametrize("folder", ["../..", "/tmp", f"1-{B}", "", "x"])  # noqa: S108
def test_a_file_moves_nowhere_else(two: tuple[KvFolder, KvFolder], folder: str) -> None:
    one, other = two
    one.file("x.kv").write_bytes(b"kv")
    assert not one.give("x.kv", folder, other.marker)
    assert not one.give("x.kv", other.name, "another machine's marker")
    assert one.file("x.kv").exists()


@pytest.mark.parametrize("name", ["../x.kv", "x.txt", "/x.kv", "", "X.kv"])
def test_only_names_of_kv_files_are_names(two: tuple[KvFolder, KvFolder], name: str) -> None:
    with pytest.raises(ValueError, match="not a KV file name"):
        two[0].remove(name)


def test_a_start_sweeps_the_dead_and_spares_the_living(tmp_path: Path) -> None:
    living = KvFolder(A, tmp_path)
    script = f"""
        import os, pathlib
        from twinpool.worker.shared_memory import KvFolder
        folder = KvFolder({B!r}, pathlib.Path({str(tmp_path)!r}))
        folder.file("x.kv").write_bytes(b"kv")
        os._exit(9)  # no clean-up
    """
    dead = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    assert dead.returncode == 9
    users = living.path.parent
    assert len(list(users.glob(f"*{B}*"))) == 2, "folder and lock"
    assert [name.rpartition("-")[2] for name in sweep(users)] == [B]
    assert sorted(users.iterdir()) == [living.path, users / f"{living.name}.lock"]
    living.close()


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"twinpool-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(UserError, match="not a private folder"):
        KvFolder(A, tmp_path)
