"""What lies in the package: cost profiles, scenarios and extracts of traces, by name; or a path of the user's own."""

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from twinpool.errors import UserError
from twinpool.profile import Profile, parse_profile
from twinpool.sim.scenario import Scenario, parse_scenario
from twinpool.workload.offered import LONG_PROMPT_TOKENS, Offered
from twinpool.workload.traces import trace

_SHELF = files("twinpool.sim")


def names(kind: str, suffix: str) -> list[str]:
    """Of what lies under `kind` (a folder of the package)."""
    found = (_SHELF / kind).iterdir()
    return sorted(entry.name.removesuffix(suffix) for entry in found if entry.name.endswith(suffix))


def load_profile(name: str) -> Profile:
    """Raises `UserError` where there is none of this name or path, or it is unusable."""
    place = _find("profiles", name, (".json",), what="profile")
    return parse_profile(_read(place, name), name)


def load_scenario(name: str) -> Scenario:
    return parse_scenario(_read(_find("gallery", name, (".toml",), what="scenario"), name), name)


def open_trace(name: str, *, long_prompt_tokens: int = LONG_PROMPT_TOKENS) -> Iterator[Offered]:
    """Line by line: a trace of days is never in memory whole."""
    place = _find("traces", name, (".csv", ".jsonl"), what="trace")
    try:
        with place.open(encoding="utf-8") as lines:
            yield from trace(lines, long_prompt_tokens=long_prompt_tokens)
    except UnicodeDecodeError:
        raise UserError(f"{name} is not a text file: a trace is CSV (Azure) or JSON lines (Mooncake)") from None
    except OSError as problem:
        raise UserError(f"cannot read {name}: {problem.strerror}") from None


def _find(kind: str, name: str, suffixes: tuple[str, ...], *, what: str) -> Traversable:
    for suffix in suffixes:
        place = _SHELF / kind / f"{name}{suffix}"
        if "/" not in name and place.is_file():
            return place
    path = Path(name)
    if path.is_file():
        return path
    known = ", ".join(each for suffix in suffixes for each in names(kind, suffix))
    raise UserError(f"no {what} {name}: give a file, or one of {known}")


def _read(place: Traversable, name: str) -> str:
    try:
        return place.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{name} is not a text file") from None
    except OSError as problem:
        raise UserError(f"cannot read {name}: {problem.strerror}") from None
