"""Model files: the default one, fetched once into the user's cache; any GGUF on this disk; or one from a model hub."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from twinpool.errors import UserError
from twinpool.worker.models.catalogue import DEFAULT_MODEL, ModelFile
from twinpool.worker.models.default import ensure_default_model
from twinpool.worker.models.hub import fetch_from_hub, served_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = ["ModelFile", "ensure_default_model", "open_progress", "resolve_model"]

_HUB_SPEC = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?::(?P<file>[^:]+))?")


def resolve_model(spec: str | None, progress: "Progress") -> ModelFile:
    """The file that ``--model`` means: nothing (the default model), a GGUF's path, or ``repo/name[:file]`` on the hub.

    May take minutes the first time. Raises ``UserError`` if it cannot be had.
    """
    if spec is None:
        return ModelFile(ensure_default_model(progress), DEFAULT_MODEL.name)
    if not spec:
        raise UserError("--model is empty: give a GGUF's path, or repo/name[:file] on the hub, or leave it out")
    path = Path(spec).expanduser()
    hub = _HUB_SPEC.fullmatch(spec)
    if hub and not hub["repo"].lower().endswith(".gguf") and not path.exists():
        return ModelFile(fetch_from_hub(hub["repo"], hub["file"], progress), hub["repo"])
    _check_gguf(path)
    return ModelFile(path.resolve(), served_name(path.name))


def open_progress(console: "Console | None" = None) -> "Progress":
    """Bars that count bytes, on standard error by default, for the functions here; use it as a context manager."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    class Bars(Progress):
        """Draws nothing before there is a bar: off a terminal even an empty `Progress` ends with a line."""

        def __enter__(self) -> Self:
            return self

        def add_task(self, *args: Any, **fields: Any) -> TaskID:
            self.start()
            return super().add_task(*args, **fields)

        def stop(self) -> None:
            if self.live.is_started:
                super().stop()

    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError:
        raise UserError(f"no such file: {path} (--model takes a GGUF's path, or repo/name[:file] on the hub)") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give --model the path of the GGUF in it") from None
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}; give --model a GGUF that can be read") from None
    if magic != b"GGUF":
        raise UserError(f"{path} is not a GGUF: convert the model to GGUF, or give --model another file")
