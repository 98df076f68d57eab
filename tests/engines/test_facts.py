"""What is declared, what is seen and what is assumed of an engine make one worker."""

import pytest

from twinpool.config import Connector, Declared, KvRole
from twinpool.core.model import Dialect, Role
from twinpool.engines.facts import facts_of, why_not_roles
from twinpool.engines.identity import Identity, Kind

VLLM = Identity(
    kind=Kind.VLLM,
    version="0.32.0",
    models=("m", "tuned"),
    loras=("tuned",),
    has_metrics=True,
    connector="nixl",
    block_tokens=16,
    cache_dtype="auto",
)


def facts(identity: Identity = VLLM, role: Role = Role.PREFILL, **declared):
    return facts_of("w", "http://w", role, (role,), identity, Declared(**declared))


def without_metrics(identity: Identity = VLLM) -> Identity:
    return Identity(kind=Kind.VLLM, version=identity.version, models=identity.models)


def test_a_vllm_with_nixl_hands_over() -> None:
    known = facts()
    assert (known.dialect, known.obstacle, known.connector, known.kv_role) == (Dialect.NIXL, None, "nixl", "kv_both")
    assert known.fingerprint == (("engine", "vllm 0.32.0"), ("model", "m"), ("block size", "16"), ("cache dtype", "auto"))
    assert known.lease_s is None  # the router's default holds
    assert (known.reads_handoffs, known.gives_handoffs, known.vouches, known.tensor_parallel) == (True, True, False, 1)


@pytest.mark.parametrize(
    ("identity", "role", "declared", "said"),
    [
        (VLLM, Role.PREFILL, {"connector": Connector.LMCACHE}, "its connector is LMCache: not spoken"),
        (VLLM, Role.DECODE, {"connector": Connector.MOONCAKE}, "its connector is Mooncake: not spoken"),
        (VLLM, Role.DECODE, {"connector": Connector.NONE}, "declared to have no connector"),
        (Identity(kind=Kind.VLLM, models=("m",), connector="none"), Role.PREFILL, {}, "show no connector"),
        (Identity(kind=Kind.VLLM, models=("m",), connector="lmcache"), Role.PREFILL, {}, "LMCache: not spoken"),
        (without_metrics(), Role.COLOCATED, {}, "attached as colocated"),
        (Identity(kind=Kind.LLAMA_CPP, models=("m",), obstacle="no handoff"), Role.PREFILL, {}, "no handoff"),
    ],
)
def test_what_cannot_hand_over_says_why(identity, role, declared, said) -> None:
    known = facts(identity, role, **declared)
    assert known.dialect is None
    assert said in known.obstacle


def test_an_engine_that_shows_nothing_is_taken_at_its_word() -> None:
    assert facts(without_metrics(), Role.DECODE).dialect is Dialect.NIXL


def test_what_is_declared_wins_over_what_the_metrics_do_not_show() -> None:
    shown = Identity(kind=Kind.VLLM, models=("m",), connector="none")
    assert facts(shown, connector=Connector.NIXL).dialect is Dialect.NIXL


def test_what_cannot_be_asked_is_declared() -> None:
    known = facts(lease_s=6.0, budget_tokens=2048, tensor_parallel=4, dtype="bfloat16", slots=64)
    assert (known.lease_s, known.budget_tokens, known.tensor_parallel, known.slots) == (6.0, 2048, 4, 64)
    assert ("dtype", "bfloat16") in known.fingerprint


def test_the_size_of_a_token_is_that_on_all_devices() -> None:
    shard = Identity(kind=Kind.VLLM, models=("m",), connector="nixl", block_tokens=16, kv_token_bytes=1000)
    known = facts(shard, tensor_parallel=4)
    assert (known.block_tokens, known.kv_token_bytes) == (16, 4000)


def test_half_a_role_is_half_a_worker() -> None:
    producer = facts(kv_role=KvRole.PRODUCER)
    assert (producer.reads_handoffs, producer.gives_handoffs) == (False, True)
    consumer = facts(role=Role.DECODE, kv_role=KvRole.CONSUMER)
    assert (consumer.reads_handoffs, consumer.gives_handoffs) == (True, False)


def test_a_flag_rules_roles_out() -> None:
    both = (Role.PREFILL, Role.DECODE)
    assert "never decode" in why_not_roles(both, Declared(kv_role=KvRole.PRODUCER))
    assert "gives no KV away" in why_not_roles(both, Declared(kv_role=KvRole.CONSUMER))
    assert why_not_roles(both, Declared()) is None
    assert why_not_roles((Role.PREFILL, Role.COLOCATED), Declared(kv_role=KvRole.PRODUCER)) is None


def test_the_embedded_worker_needs_no_declaration() -> None:
    known = facts(Identity(kind=Kind.EMBEDDED, version="llama.cpp 1", models=("m",), dialect=Dialect.NIXL, vouches=True))
    assert (known.dialect, known.vouches, known.obstacle, known.kv_role) == (Dialect.NIXL, True, None, None)
    assert known.engine == "llama.cpp 1"
