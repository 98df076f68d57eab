"""The part of a trace that a plan is played on: its heaviest stretch, or all of a short one, again and again.

Another stretch that does not overlap with it says how far the answer depends on the choice."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from twinpool.errors import UserError
from twinpool.profile import Profile
from twinpool.workload.offered import Offered, scaled


class Sample(NamedTuple):
    """A stretch of the traffic, from 0 on, at the rate that is asked for."""

    requests: list[Offered]
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.requests) / self.seconds

    def first(self, count: int) -> "Sample":
        """So many of its requests, at its rate; all of them where it has no more."""
        if count >= len(self.requests):
            return self
        seconds = count / self.rate
        return Sample(list(scaled(self.requests[:count], rate=(self.requests[count].at_s or seconds) / seconds)), seconds)


FEWEST_OF_A_TRACE = 100


def check_plannable(requests: Sequence[Offered]) -> None:
    """Raises `UserError` where they are no traffic to plan for."""
    count = len(requests)
    if count < FEWEST_OF_A_TRACE:
        raise UserError(
            f"{count} request{'s are' if count != 1 else ' is'} no traffic to plan for: give {FEWEST_OF_A_TRACE} or more"
        )
    if requests[-1].at_s <= requests[0].at_s:
        raise UserError("all requests of the trace come at the same moment: it has no rate to plan for")


def those_that_fit(requests: Sequence[Offered], profile: Profile) -> tuple[list[Offered], list[str]]:
    """Without those that no worker could ever hold; and a note that says so."""
    room = min(profile.context_tokens, profile.kv_tokens)
    fitting = [request for request in requests if request.prompt_tokens + request.output_tokens <= room]
    limit = "context" if profile.context_tokens <= profile.kv_tokens else "room for KV"
    if not fitting:
        shortest = min(request.prompt_tokens + request.output_tokens for request in requests)
        raise UserError(
            f"no request of the trace fits: the shortest has {shortest:,} tokens, prompt and answer, and a worker's {limit} "
            f"is {room:,} tokens"
        )
    left_out = len(requests) - len(fitting)
    if not left_out:
        return fitting, []
    if len(fitting) < FEWEST_OF_A_TRACE:
        raise UserError(
            f"only {len(fitting)} of {len(requests):,} requests fit, the others are longer, prompt and answer, than a worker's "
            f"{limit} of {room:,} tokens: that is no traffic to plan for"
        )
    return fitting, [
        f"{left_out:,} of {len(requests):,} requests are longer, prompt and answer, than a worker's {limit} of {room:,} "
        "tokens: they were left out, and would be refused"
    ]


def samples(requests: Sequence[Offered], size: int, fewest: int) -> tuple[Sample, Sample | None]:
    """The heaviest stretch of `size`; and the heaviest of half of it that does not overlap, where there is one."""
    other = max(fewest, size // 2)
    if len(requests) < size + other:
        half = len(requests) // 2
        second = _repeated(_from_zero(requests[half:]), other) if half >= fewest else None
        return _repeated(_from_zero(requests[:size]), size), second

    def heaviest(length: int, apart_from: range) -> range | None:
        """A stretch's indices."""
        starts = range(0, len(requests) - length + 1, length // 4)
        found = [range(start, start + length) for start in starts]
        able = [each for each in found if each.stop <= apart_from.start or each.start >= apart_from.stop]
        return max(able, key=lambda each: (_weight(requests[each.start : each.stop]), -each.start), default=None)

    first = heaviest(size, range(0)) or range(size)
    second_at = heaviest(other, first)
    return _from_zero(requests[first.start : first.stop]), (
        None if second_at is None else _from_zero(requests[second_at.start : second_at.stop])
    )


def _weight(stretch: Sequence[Offered]) -> float:
    """Tokens a second; one to write counts as two to read."""
    tokens = sum(each.prompt_tokens + 2 * each.output_tokens for each in stretch)
    return tokens / (stretch[-1].at_s - stretch[0].at_s or 1e-9)


def _repeated(sample: Sample, size: int) -> Sample:
    """Again and again until it is long enough. What a prompt shares with others it shares within one round only."""
    rounds = ceil(size / len(sample.requests))
    if rounds == 1:
        return sample
    apart = 1 + max((block for request in sample.requests for block in request.prefix), default=0)
    moved = [
        msgspec.structs.replace(
            request,
            at_s=request.at_s + turn * sample.seconds,
            prefix=tuple(block + turn * apart for block in request.prefix),
        )
        for turn in range(rounds)
        for request in sample.requests
    ]
    return Sample(moved, rounds * sample.seconds)


def _from_zero(requests: Sequence[Offered]) -> Sample:
    began = requests[0].at_s
    moved = [msgspec.structs.replace(request, at_s=request.at_s - began) for request in requests]
    return Sample(moved, moved[-1].at_s * len(moved) / (len(moved) - 1))


def said(sample: Sample, requests: Sequence[Offered]) -> str:
    """Which part it is, in words."""
    if len(sample.requests) == len(requests):
        return "all of the trace"
    if len(sample.requests) > len(requests):
        return f"all of the trace, {len(sample.requests) / len(requests):.0f} times over"
    return f"the heaviest {len(sample.requests):,} consecutive requests of {len(requests):,}"
