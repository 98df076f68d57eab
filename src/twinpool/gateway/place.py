"""A worker, where it listens, and which of its cached prompts may be used."""

from typing import NamedTuple

from twinpool.core.model import WorkerFacts
from twinpool.http1 import Origin


class Place(NamedTuple):
    facts: WorkerFacts
    origin: Origin
    salt: str | None = None  # see `cache_epochs`
