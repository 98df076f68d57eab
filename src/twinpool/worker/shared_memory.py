"""Where KV lies between two workers: files in a folder of the user's own, in memory where the system has such a place.

    /dev/shm/twinpool-<uid>/            0700
        <pid>-<incarnation>.lock        locked as long as its process lives, also against kill -9
        <pid>-<incarnation>/            0700
            marker                      random; who can read it shares this memory
            engine.sock                 llama.cpp's private address
            <handle>.kv

A start sweeps what dead processes left. A lock tells, not the pid: pids come again, and containers that share /dev/shm
do not see each other's.
"""

import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from twinpool.errors import UserError

_FOLDER_NAME = re.compile(r"\d{1,10}-[0-9a-f]{32}\Z")
_FILE_NAME = re.compile(r"[0-9a-z-]{1,80}\.kv\Z")


class KvFolder:
    """This process' folder. Make one, `close` it at the end."""

    def __init__(self, incarnation: str, base: Path | None = None) -> None:
        self._users = _users_folder(base)
        sweep(self._users)
        self.name = f"{os.getpid()}-{incarnation}"
        self.path = self._users / self.name
        self._lock_path = self._users / f"{self.name}.lock"
        self._lock = _locked(self._lock_path)
        self.path.mkdir(mode=0o700)
        self.marker = secrets.token_hex(32)
        (self.path / "marker").write_text(self.marker)

    def file(self, name: str) -> Path:
        if not _FILE_NAME.match(name):
            raise ValueError(f"not a KV file name: {name!r}")
        return self.path / name

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def remove(self, name: str) -> None:
        self.file(name).unlink(missing_ok=True)

    def give(self, name: str, to_folder: str, marker: str) -> bool:
        """Moves a file into another worker's folder, by name, if that proves to be in this same memory. No byte is
        copied. False: the other one is elsewhere, send the bytes."""
        if not _FOLDER_NAME.match(to_folder):
            return False
        target = self._users / to_folder
        try:
            if not secrets.compare_digest((target / "marker").read_text().encode(), marker.encode()):
                return False
            self.file(name).rename(target / name)
        except OSError:
            return False
        return True

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _users_folder(base: Path | None) -> Path:
    memory = Path("/dev/shm")  # noqa: S108 the folder below is private, and checked to be
    base = base or (memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir()))
    folder = base / f"twinpool-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        seen = folder.lstat()
    except OSError as error:
        raise UserError(f"cannot make {folder} for the KV cache: {error.strerror}") from None
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise UserError(f"{folder} is not a private folder of yours: remove it, or make it yours with mode 0700")
    return folder


def _locked(path: Path) -> int:
    """A locked descriptor. A sweep may take the lock of a file just made and unlink it: then once more."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def sweep(users: Path) -> list[str]:
    """Removes the folders of dead processes, and says which."""
    swept = []
    for folder in sorted(users.iterdir()):
        if not _FOLDER_NAME.match(folder.name) or folder.with_name(f"{folder.name}.lock").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)  # the lock is made before the folder and goes after it
        swept.append(folder.name)
    for lock in sorted(users.glob("*.lock")):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(users / lock.stem, ignore_errors=True)
            lock.unlink(missing_ok=True)
            swept.append(lock.stem)
        finally:
            os.close(descriptor)
    return swept
