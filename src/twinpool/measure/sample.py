"""What one request showed, as its client felt it."""

from collections.abc import Sequence

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Times in seconds. `meant_at_s` counts from the beginning of the traffic; `ttft_s` and `e2e_s` from that moment, whenever
    the request was really sent, so that waiting inside the load generator is not lost.

    `gaps_s` are those between the pieces of the stream, however many tokens a piece carries; `output_tokens` is what the engine
    counted, and spread over the pieces. `failure` names what became of a request that got no whole answer; of such a one no
    other time counts.
    """

    meant_at_s: float
    is_long: bool
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    gaps_s: Sequence[float] = ()
    failure: str | None = None
