"""The gateways of a comparison: what they are given, and that none is left."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from tests.cli.test_processes import children, is_gone
from tests.live.waiting import until

from twinpool.bench.arms import Split, Workers, gateway
from twinpool.engines.scripted import ScriptedEngine
from twinpool.http1 import Origin, Pool

SCRIPT = """
import asyncio, sys
from twinpool.bench.arms import Split, Workers, gateway
async def main():
    async with gateway("colocated", Workers((sys.argv[1],), ()), Split(0, 1), {}) as url:
        print(url, flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


async def test_engines_with_a_key_are_asked_with_it(engine: ScriptedEngine) -> None:
    engine.script.api_key = "sk-engine"
    pool = Pool()
    async with gateway("colocated", Workers((engine.url,), (), "sk-engine"), Split(0, 1), {}) as url:
        port = int(url.rpartition(":")[2])
        answer = await pool.fetch(Origin("127.0.0.1", port), "GET", "/v1/models", [], timeout_s=10)
    await pool.close()
    assert (answer.status, b"scripted" in answer.body) == (200, True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_gateway_ends_with_its_parent_however_that_ends(engine: ScriptedEngine, number: signal.Signals) -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, engine.url, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert (await parent.stdout.readline()).startswith(b"http")
    (started,) = children(parent.pid)
    os.kill(parent.pid, number)
    await parent.wait()
    await asyncio.to_thread(until, lambda: is_gone(started), within_s=30)
