"""What is offered: one record a request, whoever made it.

arrivals and a mix ──► offered() ──┐
a trace's lines ──────► trace() ───┴──► scaled() ──► iterator of Offered, in the order of their times
"""

from collections.abc import Iterable, Iterator
from random import Random

import msgspec

from twinpool.workload.arrivals import Arrivals
from twinpool.workload.mixes import Traffic

LONG_PROMPT_TOKENS = 1500
"""A prompt over this is long: the article's border."""

BLOCK_TOKENS = 512
"""Of a prompt, for each of `Offered.prefix`: the block of the Mooncake traces."""


class Offered(msgspec.Struct, frozen=True, gc=False):
    """One request to come. `at_s` counts from the beginning of the traffic. `prefix`: ids of the prompt's blocks of
    `BLOCK_TOKENS` from its front; equal ids at the same place mean equal text up to there. Empty: nothing is shared. Of a
    `tenant`'s requests, those of a higher `priority` go first."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    is_long: bool
    prefix: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0


def offered(
    arrivals: Arrivals, traffic: Traffic, rng: Random, *, duration_s: float, long_prompt_tokens: int = LONG_PROMPT_TOKENS
) -> Iterator[Offered]:
    """The requests of the first `duration_s` seconds. Times and lengths draw from streams of their own, so that another rate
    leaves the n-th request as long as it was."""
    of_times, of_lengths = Random(rng.getrandbits(64)), Random(rng.getrandbits(64))  # noqa: S311  # seeded, not secret
    for at_s in arrivals.times(of_times):
        if at_s >= duration_s:
            return
        prompt_tokens, output_tokens = traffic.draw(at_s, of_lengths)
        yield Offered(at_s, prompt_tokens, output_tokens, prompt_tokens > long_prompt_tokens)


def scaled(
    requests: Iterable[Offered], *, rate: float = 1.0, lengths: float = 1.0, duration_s: float | None = None
) -> Iterator[Offered]:
    """The same requests `rate` times as fast, with prompts and answers divided by `lengths`, up to `duration_s` of the new
    time. The class stays: the border of long prompts is divided with them."""
    if rate <= 0 or lengths <= 0:
        raise ValueError("a scale is above zero")
    for request in requests:
        at_s = request.at_s / rate
        if duration_s is not None and at_s >= duration_s:
            return
        yield Offered(
            at_s,
            max(1, round(request.prompt_tokens / lengths)),
            max(1, round(request.output_tokens / lengths)),
            request.is_long,
            request.prefix,
            request.tenant,
            request.priority,
        )
