"""A worker, and where it listens."""

from typing import NamedTuple

from twinpool.core.model import WorkerFacts
from twinpool.http1 import Origin


class Place(NamedTuple):
    facts: WorkerFacts
    origin: Origin
