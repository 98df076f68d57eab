"""Many requests through faults at every await point: is any answer lost, doubled, garbled or late, and does memory grow?

    clients (here) ══► `twinpool serve` ══► scripted engines      three processes; the gateway's is the one that is measured

Each answer carries its request's nonce, so a swapped, stale or broken one shows. The faults are drawn from the seed: engines
refuse, fail, hang, reset, close early, withhold the handle, answer that they failed, or are slow, before and inside the answer;
an engine is restarted now and then at its old address; clients leave at random moments. Exit 1 where anything does not hold.

With `--balance auto` every worker may take either role: traffic turns from long prompts to long answers and back each half
minute, and somebody gives workers roles over the admin port and lets go of them again, all while requests are in flight.

    python benchmarks/soak.py --requests 10000 --seed 1
    python benchmarks/soak.py --balance auto --duration 3600 --faults 0.02
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from twinpool.engines.scripted import Default, End, Recorded, Reply, Script, ScriptedEngine, answer_text

CONFIG = """
[timeouts]
connect_s = 1.0
prefill_s = 0.5
first_byte_s = 0.5
idle_s = 0.5
release_s = 0.5

[routing]
pause_s = 0.05
max_pause_s = 0.2
request_timeout_s = {deadline_s}
queue_timeout_s = 10.0
max_attempts = 6

[server]
probe_interval_s = 0.1
drain_s = 5.0
"""
WORKER = """
[[workers]]
url = "{url}"
role = "{role}"
allowed_roles = {allowed_roles}
"""
TURN_S = 30.0  # from one kind of traffic to the other
ROLE_EVERY_S = 5.0  # somebody gives a worker a role, or lets go of it
_SHOWN = 20
LONG_PROMPT_WORDS, LONG_ANSWER_TOKENS = 400, 64
DEADLINE_S = 20.0
SLACK_S = 2.0  # a leg under way at the deadline may end by its own
LEASE_S = 5.0


# The engines


def faults(engine: ScriptedEngine, rng: random.Random, ratio: float, seen: Counter[str]) -> Any:
    """A decision for each request."""

    def decide(recorded: Recorded) -> Reply | Default | None:
        seen["legs"] += 1
        if len(engine.recorded) > 200:  # it looks through all of them for each request
            del engine.recorded[:100]
        if rng.random() >= ratio:
            return Default(delay_s=rng.random() * 0.01) if rng.random() < 0.3 else None
        end = rng.choice((End.RESET, End.CLOSE, End.HANG))
        return rng.choice(
            (
                Reply.error(500),
                Reply.error(503, headers=((b"retry-after", b"0"),)),
                Reply.error(429),
                Reply.hang(),
                Reply.reset(),
                Reply(chunks=(), is_raw=True),
                Reply(chunks=((0.0, b'{"choices":['),), end=end),
                Reply(chunks=((0.0, b"HTTP/1.1 200 OK\r\nbad"),), is_raw=True),
                Default(handle=rng.choice((None, "absent"))),
                Default(finish_reason=rng.choice(("error", "abort"))),
                Default(stops_after_events=rng.randrange(12), end=end),
                Default(stops_after_events=rng.randrange(12), end=end),
                Default(delay_s=rng.random()),
            )
        )

    return decide


async def run_engines(pools: list[int], seed: int, ratio: float, restart_every_s: float) -> None:
    """Prints their URLs, lives until SIGTERM, then prints what their ledgers say."""
    rng = random.Random(seed)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with contextlib.AsyncExitStack() as stack:
        engines: list[ScriptedEngine] = []
        seen: Counter[str] = Counter()
        for _ in range(sum(pools)):
            script = Script(is_embedded=True, slots=64, lease_s=LEASE_S, token_interval_s=0.001, handoff_s=0.001)
            script.prefill_s_per_token, script.answer_tokens = 1e-4, LONG_ANSWER_TOKENS
            engine = await stack.enter_async_context(ScriptedEngine(script))
            script.on_request = faults(engine, random.Random(rng.random()), ratio, seen)
            engines.append(engine)
        print(json.dumps([engine.url for engine in engines]), flush=True)
        misuses = restarts = 0
        while not stopped.is_set():
            try:
                async with asyncio.timeout(restart_every_s):
                    await stopped.wait()
            except TimeoutError:
                engine = rng.choice(engines)
                misuses += engine.ledger.misuses
                restarts += 1
                await engine.restart()
        misuses += sum(engine.ledger.misuses for engine in engines)
        left = {"running": sum(engine.running for engine in engines), "held": sum(engine.ledger.held for engine in engines)}
        print(json.dumps({"misuses": misuses, "restarts": restarts, **seen, **left}), flush=True)


# The clients


def judge(nonce: str, told: str, status: int, body: bytes, stream: bool) -> str:
    """What came of a request, or what is wrong with its answer (beginning with `WRONG`)."""
    if status != 200:
        return f"error {status}" if "error" in json.loads(body) else f"WRONG no envelope: {status} {body[:80]!r}"
    if not stream:
        said = json.loads(body)["choices"][0]["message"]["content"]
        return "ok" if said == told else f"WRONG said {said[:60]!r} to {nonce}"
    payloads = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block]
    events = [json.loads(payload) for payload in payloads if payload != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", ())]
    said = "".join(choice["delta"].get("content") or "" for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    errors = sum("error" in event for event in events)
    if said == told and payloads.count("[DONE]") == 1 == len(ends) and payloads[-1] == "[DONE]" and not errors:
        return "ok"
    if errors == 1 and told.startswith(said) and "[DONE]" not in payloads and "stop" not in ends:
        return "error in the stream"
    bad_end = any(end in ("error", "abort") for end in ends)
    return "error in the stream" if bad_end and errors <= 1 and told.startswith(said) else f"WRONG stream: {payloads[-3:]}"


async def one(session: aiohttp.ClientSession, url: str, n: int, rng: random.Random, leaves: float) -> tuple[str, float]:
    nonce, stream = f"n{n}x", rng.random() < 0.5
    patience_s = rng.random() * 0.1 if rng.random() < leaves else None
    began = time.monotonic()
    prompt, tokens = f"please answer {nonce}", 16
    if began // TURN_S % 2:
        prompt = "word " * LONG_PROMPT_WORDS + prompt
    else:
        tokens = LONG_ANSWER_TOKENS
    told = answer_text(f"user: {prompt}", tokens)
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "scripted", "stream": stream, "messages": messages, "max_tokens": tokens}
    try:
        async with asyncio.timeout(patience_s), session.post(f"{url}/v1/chat/completions", json=body) as answer:
            outcome = judge(nonce, told, answer.status, await answer.read(), stream)
    except TimeoutError:
        outcome = "left" if patience_s is not None else "WRONG no answer"
    except (aiohttp.ClientError, ValueError) as broken:
        outcome = f"WRONG {type(broken).__name__}: {broken}"[:120]
    return outcome, time.monotonic() - began


async def give_roles(session: aiohttp.ClientSession, admin_url: str, rng: random.Random) -> int:
    """For as long as it may; how often somebody asked. Raises where the admin port fails."""
    asked = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(ROLE_EVERY_S * rng.random() * 2)
            async with session.get(f"{admin_url}/admin/state") as answer:
                workers = (await answer.json())["workers"]
            worker = rng.choice(workers)
            if not worker["held"] and sum(each["held"] for each in workers) >= len(workers) - 2:
                continue  # balance keeps something to do
            method, body = ("DELETE", None) if worker["held"] else ("POST", {"role": rng.choice(("prefill", "decode"))})
            async with session.request(method, f"{admin_url}/admin/workers/{worker['id']}/role", json=body) as answer:
                if answer.status not in (200, 409):  # 409: it is away at the moment
                    raise RuntimeError(f"{method} of a role: {answer.status} {await answer.text()}")
            asked += 1
    return asked


async def run_clients(arguments: argparse.Namespace, url: str, admin_url: str, pid: int) -> dict[str, Any]:
    count, concurrency, leaves = arguments.requests, arguments.concurrency, arguments.leaves
    ends_at = time.monotonic() + arguments.duration if arguments.duration else None
    rng = random.Random(arguments.seed)
    by_hand = 0
    outcomes: Counter[str] = Counter()
    longest_s = 0.0
    rss: list[float] = []
    numbers = itertools.count() if ends_at else iter(range(count))
    every_s = (arguments.duration or 0.0) / 10
    next_look_at = began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def client() -> None:
            nonlocal longest_s, next_look_at
            for n in numbers:
                if ends_at is not None and time.monotonic() >= ends_at:
                    return
                outcome, took_s = await one(session, url, n, rng, leaves)
                outcomes[outcome] += 1
                longest_s = max(longest_s, took_s)
                if n % max(1, count // 10) == 0 if ends_at is None else time.monotonic() >= next_look_at:
                    next_look_at = time.monotonic() + every_s
                    rss.append(rss_mib(pid))

        somebody = asyncio.create_task(give_roles(session, admin_url, rng)) if arguments.balance == "auto" else None
        await asyncio.gather(*(client() for _ in range(concurrency)))
        if somebody is not None:
            somebody.cancel()
            try:
                by_hand = await somebody
            except (RuntimeError, aiohttp.ClientError) as wrong:
                outcomes[f"WRONG admin port: {wrong}"] += 1
        took_s = time.monotonic() - began
        rss.append(rss_mib(pid))
        await asyncio.sleep(LEASE_S + 1.0)  # the last orphaned handles' leases
        async with session.get(f"{url}/metrics") as answer:
            scraped = await answer.text()
    seen = {"by_hand": by_hand, "outcomes": dict(outcomes), "took_s": took_s, "longest_s": longest_s, "rss_mib": rss}
    return {**seen, "metrics": scraped}


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def total(scraped: str, name: str, label: str = "") -> float:
    lines = [line for line in scraped.splitlines() if line.startswith(name) and line[len(name)] in "{ " and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


# Putting it together


@contextlib.contextmanager
def started(*argv: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def line_of(process: "subprocess.Popen[bytes]") -> Any:
    if process.stdout is None or not (line := process.stdout.readline()):
        raise SystemExit(f"it did not start: {process.args!r}")
    return json.loads(line)


def ended(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """SIGTERM; whether it ended by itself."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(within_s) == 0
    return False


def soak(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Runs, prints figures, and returns what does not hold."""
    pools = [arguments.prefill, arguments.decode]
    config, journal = folder / "config.toml", folder / "journal"
    is_auto = arguments.balance == "auto"
    child = (sys.executable, __file__, "--engines", *map(str, pools), "--seed", str(arguments.seed))
    child += ("--faults", str(arguments.faults), "--restart-every", str(arguments.restart_every))
    twinpool = (sys.executable, "-m", "twinpool")
    with started(*child) as engines:
        urls = line_of(engines)
        roles = ["prefill"] * pools[0] + ["decode"] * pools[1]
        allowed = [["prefill", "decode"] if is_auto else [role] for role in roles]
        workers = zip(urls, roles, map(json.dumps, allowed), strict=True)
        tables = [WORKER.format(url=url, role=role, allowed_roles=may) for url, role, may in workers]
        config.write_text(CONFIG.format(deadline_s=DEADLINE_S) + "".join(tables))
        options = ["--json", "--port", "0", "--admin-port", "0", "--config", str(config), "--journal", str(journal)]
        options += ["--balance", arguments.balance, "--learnt", str(folder / "learnt")]
        with started(*twinpool, "serve", *options) as gateway:
            ready = line_of(gateway)
            done = uvloop.run(run_clients(arguments, ready["gateway"]["url"], ready["admin_url"], gateway.pid))
            has_ended = ended(gateway, 15.0)
        engines.terminate()
        try:
            said, _ = engines.communicate(timeout=15.0)
        except subprocess.TimeoutExpired:
            raise SystemExit("the engines do not end when told to") from None
        ledgers = json.loads(said)
    files = sorted(folder.glob("journal*"))
    replays = [subprocess.run((*twinpool, "replay", str(file)), capture_output=True, check=False) for file in files]
    return report(done, ledgers, has_ended, all(replay.returncode == 0 for replay in replays))


def report(done: dict[str, Any], ledgers: dict[str, Any], has_ended: bool, replays: bool) -> list[str]:
    outcomes, scraped, rss = done["outcomes"], done["metrics"], done["rss_mib"]
    count = sum(outcomes.values())
    print(
        f"{count} requests in {done['took_s']:.1f} s, {count / done['took_s']:.0f} a second; longest {done['longest_s']:.2f} s"
    )
    changes = Counter(re.findall(r'^twinpool_role_changes_total\{reason="(\w+)"', scraped, re.MULTILINE))
    for reason in changes:
        changes[reason] = int(total(scraped, "twinpool_role_changes_total", f'reason="{reason}"'))
    print(f"roles: {done['by_hand']} requests by hand; changes by reason: {dict(changes)}")
    print(f"engines: {ledgers['legs']} legs, {ledgers['restarts']} restarts")
    print(f"{ledgers['misuses']} pulls of handles that were given back or died: each made an engine talk garbage to somebody")
    for outcome, times in sorted(outcomes.items(), key=lambda item: -item[1])[:_SHOWN]:
        print(f"{times:8d}  {outcome}")
    print(f"gateway's RSS by tenths, MiB: {' '.join(f'{mib:.1f}' for mib in rss)}; growth {rss[-1] - rss[1]:+.1f}")
    counted = total(scraped, "twinpool_requests_total")
    wrong = [f"{times} x {outcome}" for outcome, times in outcomes.items() if outcome.startswith("WRONG")]
    checks = {
        f"the gateway counted {counted:.0f} ends of {count} requests": counted <= count,  # one that left early never arrived
        f"live {total(scraped, 'twinpool_requests_live'):.0f}": total(scraped, "twinpool_requests_live") == 0,
        f"handles {total(scraped, 'twinpool_kv_handles'):.0f}": total(scraped, "twinpool_kv_handles") == 0,
        f"prompt tokens queued {total(scraped, 'twinpool_pool_queue_tokens'):.0f}": not total(
            scraped, "twinpool_pool_queue_tokens"
        ),
        f"longest request {done['longest_s']:.1f} s of {DEADLINE_S:g} s": done["longest_s"] < DEADLINE_S + SLACK_S,
        f"engines hold {ledgers['held']} handles, run {ledgers['running']}": ledgers["held"] == ledgers["running"] == 0,
        "the gateway ends when told to": has_ended,
        "the journal replays": replays,
    }
    return wrong + [f"does not hold: {what}" for what, holds in checks.items() if not holds]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--duration", type=float, metavar="S", help="in place of a number of requests")
    parser.add_argument("--balance", choices=("off", "advise", "auto"), default="off")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--faults", type=float, default=0.15, help="share of legs that go wrong")
    parser.add_argument("--leaves", type=float, default=0.15, help="share of clients that leave early")
    parser.add_argument("--restart-every", type=float, default=7.0, metavar="S")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if arguments.engines:
        uvloop.run(run_engines(arguments.engines, arguments.seed, arguments.faults, arguments.restart_every))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the children end with us
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(arguments, Path(folder))
    for line in wrong[:_SHOWN]:
        print(line)
    print("nothing lost, doubled or garbled" if not wrong else "it does not hold")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
