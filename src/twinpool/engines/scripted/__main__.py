"""`python -m twinpool.engines.scripted --port 9000`: one engine as a process. Prints its URL in one line of JSON when it
listens; ends on SIGINT or SIGTERM."""

import argparse
import asyncio
import signal
import sys

import msgspec
import uvloop

from twinpool.engines.scripted.engine import ScriptedEngine
from twinpool.engines.scripted.script import Script


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m twinpool.engines.scripted", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--token-interval-s", type=float, default=0.0)
    parser.add_argument("--prefill-s-per-token", type=float, default=0.0)
    parser.add_argument("--lease-s", type=float, default=30.0)
    return parser.parse_args()


async def _run(arguments: argparse.Namespace) -> None:
    script = Script(
        models=(arguments.model,),
        answer_tokens=arguments.answer_tokens,
        token_interval_s=arguments.token_interval_s,
        prefill_s_per_token=arguments.prefill_s_per_token,
        lease_s=arguments.lease_s,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with ScriptedEngine(script, host=arguments.host, port=arguments.port) as engine:
        sys.stdout.write(msgspec.json.encode({"url": engine.url, "model": arguments.model}).decode() + "\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    uvloop.run(_run(_arguments()))
