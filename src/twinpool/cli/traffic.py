"""Which traffic was asked for: a mix with a name, a file with one, or a trace. All files are read here."""

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from twinpool.bench.run import Traffic
from twinpool.errors import UserError
from twinpool.workload.arrivals import Arrivals, Burst, Constant, Poisson, Ramp
from twinpool.workload.mixes import MIXES, AnyTraffic, traffic_of
from twinpool.workload.offered import Offered, offered, scaled
from twinpool.workload.traces import trace

ARRIVALS = ("poisson", "constant", "burst", "ramp")
DEFAULT_RATE = 1.0
DEFAULT_DURATION_S = 60.0
BURST_FACTOR = 3.0

MOST_TOKENS = 1_000_000
"""Of a prompt or an answer: as long as the longest contexts are."""

MOST_REQUESTS = 100_000_000
"""Two days at 500 a second."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """`requests` can be gone through again and again, and gives the same each time."""

    requests: Callable[[], Iterator[Offered]]
    told: Traffic
    shares_prefixes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options, None where one was not given."""

    mix: str
    arrivals: str = "poisson"
    rate: float | None = None
    duration_s: float | None = None
    seed: int = 1
    scale_lengths: float = 1.0
    long_prompt_tokens: int = 1500


def choose_traffic(wanted: Wanted) -> Chosen:
    """`UserError` for what is neither a name nor a file of traffic."""
    if wanted.mix in MIXES:
        return _mixed(wanted, MIXES[wanted.mix])
    path = Path(wanted.mix)
    if not path.is_file():
        files = "files: a mix in JSON or TOML, or a trace"
        raise UserError(f"no such mix or file: {wanted.mix} (mixes: {', '.join(MIXES)}; {files})")

    if (traffic := _read_mix(path)) is not None:
        return _mixed(wanted, traffic)
    return _traced(wanted, path)


def mix_of(name: str) -> AnyTraffic:
    """A mix by its name or out of its file; a trace is none."""
    if name in MIXES:
        return MIXES[name]
    path = Path(name)
    traffic = _read_mix(path) if path.is_file() else None
    if traffic is None:
        raise UserError(f"no such mix: {name} (mixes: {', '.join(MIXES)}; or a file in .json or .toml)")
    return traffic


def shape_of(arrivals: str, rate: float, duration_s: float) -> tuple[Arrivals, str]:
    """A shape that fits into the duration, and its words."""
    match arrivals:
        case "constant":
            return Constant(rate=rate), f"{rate:g} requests a second, evenly spaced"
        case "burst":
            starts_s, lasts_s = 0.4 * duration_s, 0.2 * duration_s
            words = (
                f"Poisson, {rate:g} requests a second, and {BURST_FACTOR:g} times that from {starts_s:g} s for {lasts_s:g} s"
            )
            return Burst(rate=rate, factor=BURST_FACTOR, starts_s=starts_s, lasts_s=lasts_s), words
        case "ramp":
            words = f"Poisson, rising from {rate / 5:g} to {rate:g} requests a second"
            return Ramp(rate=rate / 5, to_rate=rate, over_s=duration_s), words
        case _:
            return Poisson(rate=rate), f"Poisson, {rate:g} requests a second"


def check_size(most_tokens: int, requests: float, *, scale_lengths: float) -> None:
    """`UserError` for a load that nobody can mean: it would fill the memory, or end in years."""
    tokens = most_tokens / scale_lengths
    if tokens > MOST_TOKENS:
        raise UserError(
            f"prompts or answers of up to {most_tokens:,} tokens, divided by {scale_lengths:g}, are {tokens:,.0f}: "
            f"{MOST_TOKENS:,} at most"
        )
    if requests > MOST_REQUESTS:
        raise UserError(f"that rate for that time is {requests:,.0f} requests: {MOST_REQUESTS:,} at most")


def _mixed(wanted: Wanted, traffic: AnyTraffic) -> Chosen:
    rate, duration_s = wanted.rate or DEFAULT_RATE, wanted.duration_s or DEFAULT_DURATION_S
    check_size(traffic.most_tokens, rate * duration_s, scale_lengths=wanted.scale_lengths)
    arrivals, words = shape_of(wanted.arrivals, rate, duration_s)
    told = _told(wanted, str(traffic), words, rate, duration_s)

    def requests() -> Iterator[Offered]:
        rng = Random(wanted.seed)  # noqa: S311  # repeatable, not secret
        drawn = offered(arrivals, traffic, rng, duration_s=duration_s, long_prompt_tokens=wanted.long_prompt_tokens)
        return scaled(drawn, lengths=wanted.scale_lengths)

    return Chosen(requests, told)


def _traced(wanted: Wanted, path: Path) -> Chosen:
    """As it was recorded, or as fast as asked for."""

    def recorded() -> Iterator[Offered]:
        with path.open(encoding="utf-8") as lines:
            yield from trace(lines, long_prompt_tokens=wanted.long_prompt_tokens)

    count, last_s, shares_prefixes, most_tokens = 0, 0.0, False, 0
    try:
        for request in recorded():
            count, last_s, shares_prefixes = count + 1, request.at_s, shares_prefixes or bool(request.prefix)
            most_tokens = max(most_tokens, request.prompt_tokens, request.output_tokens)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: a trace is CSV or JSON lines") from None
    except UserError as wrong:
        raise UserError(f"{path}: {wrong}") from wrong
    check_size(most_tokens, count, scale_lengths=wanted.scale_lengths)
    recorded_rate = count / last_s if last_s else float(count)
    speed = wanted.rate / recorded_rate if wanted.rate else 1.0
    duration_s = min(wanted.duration_s or float("inf"), last_s / speed + 1.0)
    words = f"the trace at {recorded_rate * speed:.3g} requests a second in the mean ({speed:.3g} times as recorded)"
    told = _told(wanted, "as recorded", words, recorded_rate * speed, duration_s)

    def requests() -> Iterator[Offered]:
        return scaled(recorded(), rate=speed, lengths=wanted.scale_lengths, duration_s=duration_s)

    return Chosen(requests, told, shares_prefixes)


def _told(wanted: Wanted, lengths: str, shape: str, rate: float, duration_s: float) -> Traffic:
    return Traffic(
        mix=wanted.mix,
        lengths=lengths,
        shape=shape,
        rate=rate,
        duration_s=duration_s,
        seed=wanted.seed,
        scale_lengths=wanted.scale_lengths,
        long_prompt_tokens=wanted.long_prompt_tokens,
    )


def _read_mix(path: Path) -> AnyTraffic | None:
    """None for a file that is no mix by its name."""
    try:
        if path.suffix == ".toml":
            return traffic_of(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
        if path.suffix == ".json":
            return traffic_of(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as broken:
        raise UserError(f"{path} cannot be read: {broken}") from broken
    return None
