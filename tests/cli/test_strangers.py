"""Whatever a stranger's service is called or says: nothing of it is obeyed by the terminal."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.bench.service import event, told
from tests.cli.test_screen import VLLM, state, worker
from tests.cli.test_status import admin

from twinpool.cli.group import cli
from twinpool.engines.scripted import Recorded, Reply, ScriptedEngine

COMMANDS = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e"
LOAD = ("--rate", "40", "--duration", "0.5", "--scale-lengths", "20")


def is_harmless(found: Result) -> bool:
    return found.output.replace("\n", "").isprintable()


async def invoke(engine: ScriptedEngine, answers: Callable[[Recorded], Reply], *arguments: str) -> Result:
    engine.script.on_request = answers
    return await asyncio.to_thread(CliRunner().invoke, cli, [*arguments])


def well(recorded: Recorded) -> Reply:
    return told(2, prompt_tokens=len(str(recorded.body["messages"]).split()))


@pytest.mark.parametrize("first_bad", [0, 3])
@pytest.mark.parametrize(
    "bad",
    [
        Reply.error(500, f"CUDA {COMMANDS}"),
        Reply.error(429, f"quota {COMMANDS}", headers=((b"retry-after", COMMANDS.encode("latin-1", "ignore")),)),
        Reply.stream(event(error={"message": f"memory {COMMANDS}"})),
        Reply(status=307, headers=((b"location", b"http://elsewhere/\x9b2J"),)),
    ],
)
async def test_an_engine_s_name_and_its_answers(bad: Reply, first_bad: int, tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        engine.script.models = (f"model {COMMANDS}",)

        def answers(recorded: Recorded) -> Reply:
            return bad if len(engine.recorded) > first_bad else well(recorded)

        for arguments in (
            ("bench", engine.url, *LOAD),
            ("check", engine.url, "--duration", "2", "--long-prompt-tokens", "100"),
            ("compare", "--engine", engine.url, "--engine", engine.url, "--model", f"other{COMMANDS}"),
            ("profile", engine.url, "--out", str(tmp_path / "p"), *("--context", "600", "--sequences", "2")),
        ):
            engine.recorded.clear()
            found = await invoke(engine, answers, *arguments)
            assert is_harmless(found), found.output
            assert found.exit_code in (1, 2)


def test_a_gateway_s_state() -> None:
    strange = VLLM | dict.fromkeys(("url", "engine", "connector", "kv_role", "obstacle", "warning"), COMMANDS)
    decision = {"age_s": 1.0, "choice": COMMANDS, "why": COMMANDS, "prefill": COMMANDS, "decode": None}
    told = state(
        worker("prefill-0", **strange | {"advice": [COMMANDS]}),
        worker("decode-0", state="lost", reason=COMMANDS),
        version=COMMANDS,
        gateway={"url": COMMANDS, "models": [COMMANDS], "draining": False},
        handles={COMMANDS: 1},
        decisions=[decision],
        indicators={"verdict": "fail", "reasons": [COMMANDS], "useful_work_ratio": None},
    )
    with admin(lambda request: (200, json.dumps(told).encode())) as url:
        for options in ([], ["--json"]):
            found = CliRunner().invoke(cli, ["status", url, *options])
            assert (found.exit_code, is_harmless(found)) == (0, True), found.output


def test_a_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.0,{COMMANDS},1\n")
    found = CliRunner().invoke(cli, ["bench", "http://127.0.0.1:1", "--mix", str(trace)])
    assert (found.exit_code, is_harmless(found)) == (2, True), found.output
