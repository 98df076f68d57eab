from collections.abc import AsyncIterator

import pytest

from twinpool.engines.scripted import ScriptedEngine


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as engine:
        yield engine
