"""From a profile's tables to the few figures that the estimates start from.

Straight lines through tables are wrong somewhere; they are laid where the work is: batches of 8 and more, prompts in chunks as
large as the engine's budget, since that is how it reads when there is more than one.
"""

from collections.abc import Sequence
from itertools import pairwise

from twinpool.core.law import CostPrior
from twinpool.policy.fits import Fit
from twinpool.profile import Profile


def prior_of(profile: Profile, budget_tokens: int | None) -> CostPrior:
    """What a worker of this profile takes, with engines that read `budget_tokens` a step."""
    lengths = [(tokens, ms / 1e3) for tokens, ms in profile.prefill_ms]
    (before, before_s), (last, last_s) = lengths[-2:]
    pair_s = max(0.0, (last_s / last - before_s / before) / (last - before))
    chunk = min(budget_tokens or 2048, lengths[-1][0])
    full_s = _between(lengths, chunk) - pair_s * chunk * chunk
    fewest = min(8, max(profile.batches) / 2)  # under 8 a step is on its floor
    cells = [cell for cell in profile.decode_step_ms if cell[0] >= fewest]
    rows = [((1.0, batch, batch * context), ms / 1e3, 1.0) for batch, context, ms in cells]
    step = Fit(3, prior=rows)
    step_s, sequence_s, kv_token_s = step.coefficients or [0.0, 0.0, 0.0]
    short, long = 256, 1024
    mixed_token_s = max(0.0, (_added(lengths, 64, long) - _added(lengths, 64, short)) / (long - short))
    free_tokens, free_sequence_tokens = _free(lengths, mixed_token_s)
    return CostPrior(
        read_s=0.0,
        read_token_s=full_s / chunk,
        read_pair_s=pair_s,
        step_s=step_s,
        step_sequence_s=sequence_s,
        step_kv_token_s=kv_token_s,
        mixed_s=profile.mixed_step_extra_ms / 1e3,
        mixed_token_s=mixed_token_s,
        free_tokens=free_tokens,
        free_sequence_tokens=free_sequence_tokens,
        handoff_s=profile.handoff_latency_ms / 1e3,
        handoff_token_s=profile.kv_bytes_per_token / profile.handoff_bytes_per_s,
    )


def _free(lengths: Sequence[tuple[int, float]], mixed_token_s: float) -> tuple[float, float]:
    """Prompt tokens that a step takes along for nothing, and by how many fewer for each sequence it writes for. None, where
    no token can be told to cost anything: then all of them cost nothing."""
    if not mixed_token_s:
        return 0.0, 0.0
    few, many = 16, 192
    of_few, of_many = (512 - _added(lengths, batch, 512) / mixed_token_s for batch in (few, many))
    a_sequence = max(0.0, (of_few - of_many) / (many - few))
    return of_few + a_sequence * few, a_sequence


def _added(lengths: Sequence[tuple[int, float]], batch: int, tokens: int) -> float:
    """By a chunk of so many tokens to a step that writes for `batch` sequences."""
    return _between(lengths, batch + tokens) - _between(lengths, batch)


def _between(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """On the line through the two points nearest to it."""
    (low, low_s), (high, high_s) = next((pair for pair in pairwise(points) if tokens <= pair[1][0]), (points[-2], points[-1]))
    return low_s + (high_s - low_s) * (tokens - low) / (high - low)
