"""The embedded worker: it tells everything itself at `/twinpool/identity`."""

import msgspec

from twinpool.core.model import Dialect
from twinpool.engines.asking import ProbeError
from twinpool.engines.identity import Ask, Identity, Kind


class _Said(msgspec.Struct):
    engine: str
    engine_version: str
    incarnation: str
    model: str
    slots: int
    context_tokens: int
    lease_s: float
    continues: bool = False


async def ask_embedded(ask: Ask) -> Identity | None:
    """None where it is another engine."""
    page = await ask("/twinpool/identity")
    if page is None:
        return None
    try:
        said = msgspec.json.decode(page, type=_Said)
    except (msgspec.DecodeError, UnicodeDecodeError) as strange:
        raise ProbeError(f"its answer is not understood: {strange}") from strange
    return Identity(
        kind=Kind.EMBEDDED,
        version=f"{said.engine} {said.engine_version}",
        incarnation=said.incarnation,
        models=(said.model,),
        dialect=Dialect.NIXL,
        vouches=True,
        has_metrics=True,
        slots=said.slots,
        context_tokens=said.context_tokens,
        lease_s=said.lease_s,
        continues=said.continues,
    )
