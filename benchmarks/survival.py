"""A real service whose workers are killed while clients ask and leave: does every request end right or with a clean error?

    clients (here) ══► `twinpool serve` ══► its two llama.cpp workers, each killed -9 several times

A quarter of the clients hang up at a random moment. Afterwards nothing may be left: no request, no handle, no file in shared
memory, no process; and the journal of it all must replay. Exit 1 where anything does not hold.

    python benchmarks/survival.py --requests 500 --concurrency 20 --kills 3
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

WORDS = ("river", "stone", "light", "winter", "paper", "garden", "harbour", "night")
SHARED_MEMORY = Path(f"/dev/shm/twinpool-{os.getuid()}")  # noqa: S108 - looked at, not written
SETTLED_WITHIN_S = 45.0  # a lease and a bit


class Unclean(Exception):  # noqa: N818 - a verdict
    """An answer that is neither right nor a clean error."""


def body_of(n: int, dice: random.Random, model: str) -> tuple[str, dict[str, Any]]:
    """Route and body of the n-th request: both routes, streamed and not, prompts of 20 to 200 tokens."""
    text = f"{secrets.token_hex(4)} " + " ".join(dice.choices(WORDS, k=dice.randint(10, 180)))
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": dice.randint(1, 32)}
    if n % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if n % 4 < 2:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text}


def judge_whole(status: int, raw: bytes) -> str:
    answer = json.loads(raw)
    if status != 200:
        if (status < 500 and status != 429) or not answer["error"]["message"] or not answer["error"]["code"]:
            raise Unclean(f"{status}: {raw[:200]!r}")
        return f"error {status}"
    (choice,) = answer["choices"]
    if choice["finish_reason"] not in ("stop", "length") or not answer["usage"]["completion_tokens"]:
        raise Unclean(f"200: {raw[:300]!r}")
    return "ok"


def judge_stream(events: list[dict[str, Any]], done: bool, most: int) -> str:
    errors = [event for event in events if "error" in event]
    finishes = [c["finish_reason"] for event in events for c in event.get("choices", ()) if c.get("finish_reason")]
    if errors:
        if len(errors) > 1 or done or finishes:
            raise Unclean(f"an error and an end: {events[-3:]}")
        return "error in the stream"
    usages = [event["usage"] for event in events if event.get("usage")]
    ids = {event["id"] for event in events}
    if not done or len(finishes) != 1 or len(usages) != 1 or len(ids) != 1:
        raise Unclean(f"done {done}, finishes {finishes}, usages {usages}, ids {len(ids)}")
    if not 1 <= usages[0]["completion_tokens"] <= most:
        raise Unclean(f"{usages[0]} of at most {most}")
    return "ok"


async def ask(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> str:
    async with session.post(path, json=body) as answer:
        if answer.content_type != "text/event-stream":
            return judge_whole(answer.status, await answer.read())
        events, done = [], False
        async for line in answer.content:
            done = done or line.strip() == b"data: [DONE]"
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
        return judge_stream(events, done, body["max_tokens"])


async def one(session: aiohttp.ClientSession, n: int, dice: random.Random, model: str, leaves: float) -> str:
    """How the n-th request ended. One that may leave does so at a random moment of the time that it might take."""
    patience_s = dice.uniform(0, 4) if dice.random() < leaves else None
    try:
        async with asyncio.timeout(patience_s):
            return await ask(session, *body_of(n, dice, model))
    except TimeoutError:
        return "left"
    except Unclean as verdict:
        return f"UNCLEAN {verdict}"
    except (aiohttp.ClientError, ValueError, KeyError) as broken:
        return f"UNCLEAN {type(broken).__name__}: {broken}"


async def kill_workers(admin: str, kills: int, every_s: float, killed: Counter[str], incarnations: set[str]) -> None:
    """Kill each worker in turn, when all are up, until each was killed so often; and note what lives they had."""
    async with aiohttp.ClientSession(admin) as session:
        while True:
            await asyncio.sleep(every_s)
            async with session.get("/admin/state") as answer:
                workers = (await answer.json())["workers"]
            if any(worker["state"] != "ready" for worker in workers):
                continue
            incarnations |= {worker["incarnation"] for worker in workers}
            victim = min(workers, key=lambda worker: (killed[worker["id"]], worker["id"]))
            if killed[victim["id"]] == kills:
                return
            os.kill(pid_of(victim["incarnation"]), signal.SIGKILL)
            killed[victim["id"]] += 1


def pid_of(incarnation: str) -> int:
    """A worker's folder in shared memory has its pid and incarnation as its name."""
    (folder,) = SHARED_MEMORY.glob(f"*-{incarnation}")
    return int(folder.name.partition("-")[0])


async def run(given: argparse.Namespace, ready: dict[str, Any], pid: int, incarnations: set[str]) -> list[str]:
    """All requests; what does not hold."""
    url, model = ready["gateway"]["url"], ready["gateway"]["models"][0]
    outcomes: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    memory: list[int] = []
    numbers = itertools.count()
    dice = random.Random(given.seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(total=180)) as session:

        async def client() -> None:
            while (n := next(numbers)) < given.requests or not killer.done():  # there is load as long as workers die
                outcomes[await one(session, n, dice, model, given.leaves)] += 1
                memory.append(resident_bytes(pid))

        killer = asyncio.create_task(kill_workers(ready["admin_url"], given.kills, given.kill_every, killed, incarnations))
        await asyncio.gather(killer, *(client() for _ in range(given.concurrency)))
        wrong = [outcome for outcome in outcomes if outcome.startswith("UNCLEAN")]
        wrong += await until_settled(session)
    tenth = max(1, len(memory) // 10)
    early, late = max(memory[tenth : 2 * tenth], default=0), max(memory[-tenth:])
    print(f"{outcomes.total()} requests: {dict(outcomes.most_common())}\nkilled: {dict(killed)}")
    print(f"gateway's memory: {early / 2**20:.1f} MiB early, {late / 2**20:.1f} MiB at the end")
    return wrong


async def until_settled(session: aiohttp.ClientSession) -> list[str]:
    """Wait until nothing runs, waits or is held; what is left, when it takes too long."""
    end = time.monotonic() + SETTLED_WITHIN_S
    while True:
        async with session.get("/metrics") as answer:
            left = [
                line
                for line in (await answer.text()).splitlines()
                if line.startswith(("twinpool_kv_handles", "twinpool_requests_live", "twinpool_requests_waiting"))
                and not line.endswith(" 0.0")
            ]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.2)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=500)
    options.add_argument("--concurrency", type=int, default=20)
    options.add_argument("--leaves", type=float, default=0.25, help="share of clients that hang up")
    options.add_argument("--kills", type=int, default=3, help="of each worker")
    options.add_argument("--kill-every", type=float, default=8.0, metavar="S", help="at the most")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        command = [sys.executable, "-m", "twinpool", "serve", "--json", "--port", "0", "--admin-port", "0"]
        began = time.monotonic()
        files = ["--journal", str(journal), "--log", str(Path(folder, "log"))]
        with subprocess.Popen([*command, *files], stdout=subprocess.PIPE) as process:
            if process.stdout is None or not (line := process.stdout.readline()):
                raise SystemExit("it did not start")
            incarnations: set[str] = set()
            wrong = asyncio.run(run(given, json.loads(line), process.pid, incarnations))
            process.terminate()
            if process.wait(60) != 0:
                wrong.append(f"serve ended with {process.returncode}")
        replayed = subprocess.run([sys.executable, "-m", "twinpool", "replay", str(journal)], capture_output=True, text=True)
        if replayed.returncode != 0:
            wrong.append(f"the journal does not replay: {replayed.stdout}")
        print(replayed.stdout.strip())
    wrong += [f"left in shared memory: {path}" for name in incarnations for path in SHARED_MEMORY.glob(f"*-{name}*")]
    print(f"{time.monotonic() - began:.0f} s: {'holds' if not wrong else 'DOES NOT HOLD'}")
    for what in wrong:
        print(f"  {what}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
