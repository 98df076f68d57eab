"""Whether the KV that one worker writes can be read by another; and if not, why, in words for a person.

Only what is known of both is compared. What nobody tells (an attention backend, a revision of the weights) is the canary's to
find out: two workers that are compatible by this are a pair that may be tried, not one that is proved.
"""

from twinpool.core.model import Dialect, WorkerFacts


def why_not_compatible(prefill: WorkerFacts, decode: WorkerFacts) -> str | None:
    """None where `decode` may read what `prefill` holds. A worker is no pair with itself."""
    if prefill.worker == decode.worker:
        return "a worker hands nothing over to itself"
    for worker in (prefill, decode):
        if worker.dialect is None:
            return f"{worker.worker} hands nothing over: {worker.obstacle or 'its engine has no handoff'}"
    if prefill.dialect is not decode.dialect:
        return f"{prefill.worker} hands over by {prefill.dialect}, {decode.worker} by {decode.dialect}"
    if not prefill.gives_handoffs:
        return f"{prefill.worker} was launched {prefill.kv_role or 'as a consumer'}: it gives no KV away"
    if not decode.reads_handoffs:
        return f"{decode.worker} was launched {decode.kv_role or 'as a producer'}: it must not read KV of others"
    return _difference(prefill, decode) or _topology(prefill, decode)


def _difference(prefill: WorkerFacts, decode: WorkerFacts) -> str | None:
    theirs = dict(decode.fingerprint)
    for what, value in prefill.fingerprint:
        other = theirs.get(what, value)
        if other != value:
            return f"{what}: {prefill.worker} has {value}, {decode.worker} has {other}"
    return None


def _topology(prefill: WorkerFacts, decode: WorkerFacts) -> str | None:
    """vLLM's NIXL connector reads each of P's shards into whole shards of D: its source asserts that one divides the other."""
    if prefill.dialect is not Dialect.NIXL or decode.tensor_parallel % prefill.tensor_parallel == 0:
        return None
    return (
        f"tensor parallel size: {decode.worker} has {decode.tensor_parallel}, which is no multiple of {prefill.worker}'s "
        f"{prefill.tensor_parallel}"
    )
