import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
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


async def bench(engine: ScriptedEngine, *options: str) -> Result:
    engine.script.on_request = lambda recorded: told(2, prompt_tokens=len(str(recorded.body["messages"]).split()))
    return await asyncio.to_thread(CliRunner().invoke, cli, ["bench", engine.url, *options])


async def test_why_there_is_no_use_is_told_as_it_is() -> None:
    load = ("--rate", "40", "--duration", "0.5", "--scale-lengths", "20")
    async with ScriptedEngine() as engine:
        for given in ((), ("--metrics", engine.url)):
            watched = await bench(engine, *load, *given)
            assert "not observable: it was over before its first window of 10 s" in watched.output
        engine.script.metrics = {"vllm:num_requests_running": None}
        blind = " ".join((await bench(engine, *load)).output.split())
    assert "has no metrics page that tells it, and no --metrics were given" in blind


def test_a_url_that_stands_where_a_file_does_is_named() -> None:
    found = CliRunner().invoke(cli, ["bench", "--json", "http://127.0.0.1:9"])
    assert found.exit_code == 2
    assert "--json http://127.0.0.1:9 would write to a file of that name: write --json=-" in found.stderr


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--scale-lengths", "0.001"), "divided by 0.001, are 4,000,000: 1,000,000 at most"),
        (("--rate", "1000", "--duration", "1e6"), "1,000,000,000 requests: 100,000,000 at most"),
        (("--duration", "1e300"), "requests: 100,000,000 at most"),
        (("--mix", "huge.json"), "2,000,000 tokens, divided by 1, are 2,000,000"),
        (("--mix", "huge.csv"), "3,000,000 tokens, divided by 1, are 3,000,000"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_load_that_nobody_can_mean_is_refused_before_it_begins(
    command: str, options: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    part = {
        "share": 1,
        "prompt": {"drawn": "uniform", "low": 1, "high": 2_000_000},
        "output": {"drawn": "exactly", "tokens": 1},
    }
    Path("huge.json").write_text(json.dumps({"kind": "mix", "parts": [part]}))
    Path("huge.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,3000000,1\n")
    if command == "compare":
        if "huge.csv" in options:
            return  # it takes no traces
        where, rate = ("--engine", "127.0.0.1:1", "--engine", "127.0.0.1:1"), ("--rate", "1")
    else:
        where, rate = ("127.0.0.1:1",), ()
    found = CliRunner().invoke(cli, [command, *where, *rate, *options])
    assert (found.exit_code, found.stderr.count("\n")) == (2, 1), found.output
    assert why in found.stderr or (command == "compare" and "requests: 100,000,000 at most" in found.stderr)


async def test_lengths_that_were_not_kept_are_said_first(tmp_path: Path) -> None:
    """BM-06."""
    page, told_json = tmp_path / "page.html", tmp_path / "told.json"
    async with ScriptedEngine() as engine:

        def answers(recorded: Recorded) -> Reply:
            tokens = len(str(recorded.body["messages"]).split())
            return told(2, prompt_tokens=tokens if len(engine.recorded) <= 2 else tokens * 2)

        engine.script.on_request = answers
        load = ("--rate", "40", "--duration", "0.5", "--scale-lengths", "20")
        more = ("--json", str(told_json), "--html", str(page))
        found = await asyncio.to_thread(CliRunner().invoke, cli, ["bench", engine.url, *load, *more])
    assert found.output.index("THE PROMPTS WERE NOT AS LONG AS ASKED FOR") < found.output.index("TTFT")
    assert "off the lengths asked for" in found.output
    assert "off the lengths asked for" in page.read_text()
    assert json.loads(told_json.read_text())["generator"]["kept_lengths"] is False
