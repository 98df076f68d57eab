"""What a client saw of its request, whichever of the two served it; seconds."""

import msgspec


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    ttft_s: float
    e2e_s: float
    gap_mean_s: float
    gap_worst_s: float
