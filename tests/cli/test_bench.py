import asyncio

import pytest
from click.testing import CliRunner
from tests.bench.service import told

from twinpool.cli.group import cli
from twinpool.engines.scripted import Recorded, Reply, ScriptedEngine


@pytest.mark.parametrize("is_broken", [True, False])
async def test_a_load_of_which_nothing_came_back_ends_loudly(is_broken: bool) -> None:
    def answers(recorded: Recorded) -> Reply:
        if is_broken and len(engine.recorded) > 2:  # two calibrate
            return Reply.error(500, "CUDA error")
        return told(2, prompt_tokens=len(str(recorded.body["messages"]).split()))

    async with ScriptedEngine() as engine:
        engine.script.on_request = answers
        options = ["--rate", "40", "--duration", "0.5", "--scale-lengths", "20", "--arrivals", "constant"]
        found = await asyncio.to_thread(CliRunner().invoke, cli, ["bench", engine.url, *options])
    assert found.exit_code == int(is_broken), found.output
    assert ("EVERY COUNTED REQUEST FAILED" in found.output) is is_broken
