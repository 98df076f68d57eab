"""By what the law decides: the objectives it serves, how roles are balanced, and what was known of costs beforehand.

Part of the journal beside the rules: a replay builds its policies from it.
"""

import msgspec

from twinpool.config import Balance, BalanceMode, Objectives


class CostPrior(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker takes for its work, as far as somebody measured it before; seconds.

    Reading a prompt of `u` uncached tokens behind `k` cached ones: `read_s + read_token_s·u + read_pair_s·u·(u + 2k)`. A step
    that writes a token for each of `b` sequences with `c` tokens of KV together: `step_s + step_sequence_s·b +
    step_kv_token_s·c`, and with a chunk of `n` prompt tokens in it `mixed_s + mixed_token_s·n` more, but for those that a step
    on its floor takes for nothing: `free_tokens - free_sequence_tokens·b`. A handoff: `handoff_s + handoff_token_s` a token."""

    read_s: float
    read_token_s: float
    read_pair_s: float
    step_s: float
    step_sequence_s: float
    step_kv_token_s: float
    mixed_s: float
    mixed_token_s: float
    free_tokens: float = 0.0
    free_sequence_tokens: float = 0.0
    handoff_s: float = 0.003
    handoff_token_s: float = 0.0
    most_batch: float | None = None  # the largest that was seen; None: the figures hold for all


class Law(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where it `learns` nothing and has no priors, the least loaded worker is chosen. `priors` by kind of worker
    (`core.model.kind_of`); the one for "" is for kinds that have none of their own. `prompt_lengths`: what another one had
    learnt of them (`PromptLengths.remember`)."""

    objectives: Objectives = Objectives()
    balance: Balance = Balance(mode=BalanceMode.OFF)
    priors: dict[str, CostPrior] = {}
    learns: bool = True
    prompt_lengths: dict[str, float] = {}
