"""Which lengths come together, and how that changes over time.

A `Mix` is parts with shares; a `Drift` goes from one mix to another and back along points in time, a `Swing` jumps between two.
`MIXES` has those with a name; a file has the same in JSON or TOML (read by whoever may, parsed by `traffic_of`).
"""

from collections.abc import Mapping
from math import inf
from random import Random
from typing import Protocol, cast

import msgspec

from twinpool.errors import UserError
from twinpool.workload.lengths import Exactly, Lengths, Uniform


class Traffic(Protocol):
    """Lengths of the request that arrives at `at_s`: tokens of its prompt and of its answer."""

    def draw(self, at_s: float, rng: Random) -> tuple[int, int]: ...


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of request; `share` of 1 of all."""

    share: float
    prompt: Lengths
    output: Lengths


class Mix(msgspec.Struct, frozen=True, kw_only=True, tag="mix", tag_field="kind", forbid_unknown_fields=True):
    """Parts whose shares add up to 1."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        shares = [part.share for part in self.parts]
        if not shares or not (min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):
            raise UserError("the shares of a mix are from 0 on and add up to 1")

    def draw(self, at_s: float, rng: Random) -> tuple[int, int]:
        left = rng.random()
        part = self.parts[-1]
        for part in self.parts:  # the last one where rounding leaves nothing
            left -= part.share
            if left < 0:
                break
        return part.prompt.draw(rng), part.output.draw(rng)

    @property
    def most_tokens(self) -> int:
        """Of a prompt or an answer."""
        return max(max(part.prompt.most, part.output.most) for part in self.parts)

    def __str__(self) -> str:
        return "; ".join(f"{part.share:.0%} prompts of {part.prompt} tokens, answers of {part.output}" for part in self.parts)


class Drift(msgspec.Struct, frozen=True, kw_only=True, tag="drift", tag_field="kind", forbid_unknown_fields=True):
    """Requests of `to` instead of `start` with a share that goes in straight lines through `points` of (second, share)."""

    start: Mix
    to: Mix
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [at_s for at_s, _ in self.points]
        is_rising = all(before < after for before, after in zip((-inf, *times), (*times, inf), strict=True))
        if not times or not is_rising or not all(0 <= share <= 1 for _, share in self.points):
            raise UserError("a drift's points are rising seconds with shares between 0 and 1")

    @property
    def most_tokens(self) -> int:
        return max(self.start.most_tokens, self.to.most_tokens)

    def share_at(self, at_s: float) -> float:
        """Of `to`."""
        before_s, before = self.points[0]
        if at_s <= before_s:
            return before
        for after_s, after in self.points[1:]:
            if at_s < after_s:
                return before + (after - before) * (at_s - before_s) / (after_s - before_s)
            before_s, before = after_s, after
        return before

    def draw(self, at_s: float, rng: Random) -> tuple[int, int]:
        return (self.to if rng.random() < self.share_at(at_s) else self.start).draw(at_s, rng)


class Swing(msgspec.Struct, frozen=True, kw_only=True, tag="swing", tag_field="kind", forbid_unknown_fields=True):
    """`one` for `every_s` seconds, then `other` for as long, and again."""

    one: Mix
    other: Mix
    every_s: float

    def __post_init__(self) -> None:
        if not 1e-3 <= self.every_s < inf:
            raise UserError("a swing has an every_s of a millisecond at least")

    @property
    def most_tokens(self) -> int:
        return max(self.one.most_tokens, self.other.most_tokens)

    def draw(self, at_s: float, rng: Random) -> tuple[int, int]:
        return (self.other if int(at_s / self.every_s) % 2 else self.one).draw(at_s, rng)


AnyTraffic = Mix | Drift | Swing


_SHORT, _LONG = Uniform(100, 900), Uniform(2000, 4000)  # either side of the 1,500 tokens, with means of 500 and 3,000


def short_and_long(long_share: float, *, output: Lengths = Uniform(100, 300)) -> Mix:  # noqa: B008  frozen
    """Prompts of 100 to 900 tokens, and of 2,000 to 4,000; answers of 200 in the mean."""
    parts = (
        Part(share=1 - long_share, prompt=_SHORT, output=output),
        Part(share=long_share, prompt=_LONG, output=output),
    )
    return Mix(parts=parts)


MIXES: Mapping[str, AnyTraffic] = {
    "mixed-60-40": short_and_long(0.4),  # the article's
    "mixed-90-10": short_and_long(0.1),
    "short": short_and_long(0.0),
    "long": short_and_long(1.0),
    "decode-heavy": short_and_long(0.1, output=Uniform(300, 700)),
    "drift": Drift(start=short_and_long(0.0), to=short_and_long(1.0), points=((0, 0.1), (300, 0.7), (600, 0.1))),
    "swing": Swing(one=short_and_long(0.6, output=Exactly(60)), other=short_and_long(0.1, output=Exactly(500)), every_s=120),
}


def traffic_of(value: object, origin: str) -> AnyTraffic:
    """From parsed JSON or TOML, ``{"kind": "mix", "parts": [{"share": 1, "prompt": {"drawn": "exactly", "tokens": 9}, …}]}``.
    `origin` (a path) serves the message of the `UserError`."""
    try:
        return cast(AnyTraffic, msgspec.convert(value, AnyTraffic))
    except (msgspec.ValidationError, UserError) as wrong:
        raise UserError(f"{origin}: {wrong}") from wrong
