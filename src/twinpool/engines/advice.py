"""What a person could do about an engine that is attached as it is: what to declare of it, and what to launch it with. Pure."""

from twinpool.core.model import Role, WorkerFacts
from twinpool.engines.identity import Kind

_LARGEST_BUDGET_TOKENS = 4096
"""One step must end before a reader notices. Simulated with measured step times of a 70B model on H100s, a budget of 2,048 to
4,096 in both roles kept the most requests within their objectives; vLLM's default of 8,192 stalled every stream beside it."""


def advice(facts: WorkerFacts) -> tuple[str, ...]:
    """Nothing for engines that tell everything themselves."""
    if facts.kind != Kind.VLLM:
        return ()
    said = []
    if facts.budget_tokens is None:
        said.append("declare budget_tokens: what its --max-num-batched-tokens is; it cannot be asked")
    elif facts.budget_tokens > _LARGEST_BUDGET_TOKENS and facts.allowed_roles != (Role.PREFILL,):
        said.append(
            f"set --max-num-batched-tokens {_LARGEST_BUDGET_TOKENS} or less: a step of {facts.budget_tokens:,} tokens holds up "
            "every stream beside it"
        )
    if facts.dialect is not None and facts.gives_handoffs and facts.lease_s is None:
        said.append("declare lease_s: its kv_lease_duration; vLLM's default is assumed")
    if facts.dialect is not None and not facts.has_metrics:
        said.append("launch it without --disable-log-stats: without metrics a late handoff cannot be told from a good one")
    return tuple(said)
