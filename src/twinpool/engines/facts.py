"""What is known of a worker: what its engine says, what the configuration declares, and defaults for the rest. Pure.

What is declared wins over what the metrics show: a vLLM older than their series may have the connector all the same.
"""

from collections.abc import Collection

from twinpool.config import Connector, Declared, KvRole
from twinpool.core.model import Dialect, Role, WorkerFacts
from twinpool.engines.identity import Identity, Kind

_NOT_SPOKEN = {
    Connector.LMCACHE: "its connector is LMCache: not spoken",
    Connector.MOONCAKE: "its connector is Mooncake: not spoken",
}


def facts_of(
    worker: str, url: str, role: Role, allowed_roles: tuple[Role, ...], identity: Identity, declared: Declared
) -> WorkerFacts:
    """The worker as the core is to know it."""
    connector: Connector | None = None
    kv_role: KvRole | None = None
    dialect, obstacle = identity.dialect, identity.obstacle
    if identity.kind is Kind.VLLM:
        connector = _connector(identity, declared, allowed_roles)
        kv_role = None if connector is Connector.NONE else declared.kv_role
        obstacle = _vllm_obstacle(connector, declared, allowed_roles)
        dialect = Dialect.NIXL if obstacle is None else None
    tensor_parallel = declared.tensor_parallel or identity.tensor_parallel or 1
    return WorkerFacts(
        worker=worker,
        url=url,
        incarnation=identity.incarnation,
        engine=identity.engine,
        kind=str(identity.kind),
        version=identity.version,
        models=identity.models,
        loras=identity.loras,
        role=role,
        allowed_roles=allowed_roles,
        dialect=dialect,
        obstacle=obstacle,
        connector=identity.connector if connector is None else str(connector),
        kv_role=None if kv_role is None else str(kv_role),
        reads_handoffs=kv_role is not KvRole.PRODUCER,
        gives_handoffs=kv_role is not KvRole.CONSUMER,
        vouches=identity.vouches,
        has_metrics=identity.has_metrics,
        slots=identity.slots if declared.slots is None else declared.slots,
        context_tokens=identity.context_tokens,
        lease_s=identity.lease_s if declared.lease_s is None else declared.lease_s,
        serves_whole=identity.serves_whole,
        continues=identity.continues,
        fingerprint=_fingerprint(identity, declared),
        tensor_parallel=tensor_parallel,
        kv_capacity_tokens=identity.kv_capacity_tokens,
        block_tokens=identity.block_tokens,
        kv_token_bytes=_all_shards(identity, tensor_parallel),
        budget_tokens=identity.budget_tokens if declared.budget_tokens is None else declared.budget_tokens,
    )


def why_not_roles(allowed_roles: Collection[Role], declared: Declared) -> str | None:
    """Why an engine with this flag may not take one of these roles; None where it may take them all."""
    if declared.kv_role is KvRole.PRODUCER and Role.DECODE in allowed_roles:
        return "a kv_producer must never decode: vLLM does not protect freed blocks from a step that still runs there"
    if declared.kv_role is KvRole.CONSUMER and Role.PREFILL in allowed_roles:
        return "a kv_consumer gives no KV away: it cannot prefill for others"
    return None


def _connector(identity: Identity, declared: Declared, allowed_roles: tuple[Role, ...]) -> Connector:
    """Series of NIXL show it to be there. Their absence says nothing where there are no metrics: then an engine that is
    attached to prefill or decode is taken at its word."""
    if declared.connector is not None:
        return declared.connector
    if identity.connector is not None:
        return Connector(identity.connector)
    return Connector.NONE if set(allowed_roles) == {Role.COLOCATED} else Connector.NIXL


def _vllm_obstacle(connector: Connector, declared: Declared, allowed_roles: tuple[Role, ...]) -> str | None:
    if connector in _NOT_SPOKEN:
        return _NOT_SPOKEN[connector]
    if connector is Connector.NIXL:
        return None
    if declared.connector is not None:
        return "it is declared to have no connector"
    if set(allowed_roles) == {Role.COLOCATED}:
        return "it is attached as colocated and shows no connector"
    return "its metrics show no connector: launch vLLM with --kv-transfer-config and NixlConnector"


def _all_shards(identity: Identity, tensor_parallel: int) -> int | None:
    return None if identity.kv_token_bytes is None else identity.kv_token_bytes * tensor_parallel


def _fingerprint(identity: Identity, declared: Declared) -> tuple[tuple[str, str], ...]:
    """Of what changes the meaning or the place of a byte of KV, all that is known."""
    base = next((model for model in identity.models if model not in identity.loras), None)
    known = (
        ("engine", identity.engine if identity.version else None),
        ("model", base),
        ("dtype", declared.dtype or identity.dtype),
        ("block size", identity.block_tokens),
        ("cache dtype", identity.cache_dtype),
        ("layout", identity.kv_layout),
    )
    return tuple((what, str(value)) for what, value in known if value is not None)
