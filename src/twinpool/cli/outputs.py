"""Files that a command writes: tried before the work that fills them, and written whole or not at all."""

import os
import shutil
from pathlib import Path

from twinpool.errors import UserError

STDOUT = "-"


def check_writable(**wanted: "str | Path | None") -> None:
    """Before an hour of load rather than after it. Each by the name of its option; what is not asked for is None."""
    seen: dict[Path, str] = {}
    for name, where in wanted.items():
        if where is None or str(where) == STDOUT:
            continue
        option, path = f"--{name.replace('_', '-')}", _place(where)
        if (other := seen.setdefault(path, option)) != option and not _is_device(path):
            raise UserError(f"{other} and {option} are the same file, {where}: give two")
        _try(path, where, option)


def write_file(where: "str | Path", content: "str | bytes", option: str) -> None:
    """A reader finds the old file or the new one, never a part."""
    path = _place(where)
    whole = content.encode() if isinstance(content, str) else content
    try:
        if _is_device(path) or not os.access(path.parent, os.W_OK):
            path.write_bytes(whole)
            return
        beside = path.with_name(f".twinpool-{os.getpid()}.part")
        try:
            beside.write_bytes(whole)
            if path.exists():
                shutil.copymode(path, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as problem:
        raise _cannot(where, option, problem) from problem


def _place(where: "str | Path") -> Path:
    """Where a link leads to: the file is to be replaced, not the link."""
    path = Path(where)
    return path if _is_device(path) else path.resolve()


def _is_device(path: Path) -> bool:
    """Also a pipe, and the names of open files."""
    return path.is_relative_to("/dev") or path.is_relative_to("/proc") or (os.path.exists(path) and not os.path.isfile(path))


def _try(path: Path, where: "str | Path", option: str) -> None:
    try:
        if path.is_fifo():
            return  # to open it would be to wait for its reader
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as problem:
        raise _cannot(where, option, problem) from problem


def _cannot(where: "str | Path", option: str, problem: OSError) -> UserError:
    folder = Path(where).absolute().parent
    why = (problem.strerror or str(problem)).lower() if os.path.isdir(folder) else f"there is no folder {folder}"
    return UserError(f"cannot write {where} ({option}): {'it is a folder' if os.path.isdir(where) else why}")
