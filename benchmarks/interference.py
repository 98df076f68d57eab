"""Do short streams stand still while a long prompt is read? Two colocated workers against one prefill and one decode worker.

Four short streams run; then a prompt of 3,000 tokens arrives. For each stream: its worst gap, and the share of its time that
it stood still (inside gaps over ten times the ITL objective), from the prompt's arrival to a second after its first token. The
same model, machine, cores and slots in both arms; one worker a core. The colocated arm gets its best setting: of the batch
sizes whose prefill is within a tenth of the fastest, the one with the smallest worst gap. All are printed.

    python benchmarks/interference.py [--prompt-tokens 3000] [--batches 64,128,256,512,2048] [--rounds 3] [--json FILE]
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

import aiohttp

from service import gateway, worker

MODEL = "SmolLM2-135M-Instruct"
STREAMS = 4
SLOTS = 8  # the long prompt must not wait for a slot in either arm
ITL_OBJECTIVE_S = 0.05
STOOD_STILL_S = 10 * ITL_OBJECTIVE_S
DISAGGREGATED_BATCH = 256  # the worker's default


@dataclass
class Stream:
    """Arrival times of the pieces of one stream, seconds on one clock."""

    at: list[float] = field(default_factory=list)

    def gaps(self, start: float, end: float) -> list[float]:
        """The gaps that touch the window."""
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False) if b > start and a < end]


@dataclass
class Round:
    """What one round showed; `ttft_s` and `prompt_tokens` are the long prompt's."""

    arm: str
    batch_tokens: int
    prompt_tokens: int
    ttft_s: float
    worst_gap_s: list[float]
    stood_still_ratio: list[float]


class Stage:
    """What the readers of one round share: when all streams flow, and when they may stop."""

    def __init__(self) -> None:
        self.streams = [Stream() for _ in range(STREAMS)]
        self.flowing = asyncio.Event()
        self.end = float("inf")

    def stamped(self) -> None:
        if all(len(stream.at) >= 20 for stream in self.streams):
            self.flowing.set()


async def run_round(url: str, arm: str, batch_tokens: int, prompt_tokens: int) -> Round:
    """Four streams, then the long prompt."""
    stage = Stage()
    async with (
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=300)) as session,
        asyncio.TaskGroup() as group,
    ):
        for stream in stage.streams:
            group.create_task(_read(session, stream, stage))
        await stage.flowing.wait()
        sent = monotonic()
        first, read_tokens = await _long_prompt(session, prompt_tokens)
        stage.end = first + 1.0
    gaps = [stream.gaps(sent, stage.end) for stream in stage.streams]
    return Round(
        arm,
        batch_tokens,
        read_tokens,
        first - sent,
        [max(of_stream) for of_stream in gaps],
        [sum(gap for gap in of_stream if gap > STOOD_STILL_S) / sum(of_stream) for of_stream in gaps],
    )


async def _read(session: aiohttp.ClientSession, stream: Stream, stage: Stage) -> None:
    """One short prompt with a long answer, read until the window has closed."""
    body = {
        "model": MODEL,
        "prompt": f"{secrets.token_hex(4)} Once upon a time there was",
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                stream.at.append(monotonic())
                stage.stamped()
                if stream.at[-1] > stage.end:
                    return


async def _long_prompt(session: aiohttp.ClientSession, tokens: int) -> tuple[float, int]:
    """When its first token came, and how many tokens the prompt had."""
    words = " ".join(secrets.choice(("river", "stone", "light", "winter", "paper", "garden")) for _ in range(tokens - 20))
    body = {
        "model": MODEL,
        "prompt": f"{secrets.token_hex(4)} {words}",
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, counted = None, 0
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first = first or monotonic()
                usage = json.loads(line[6:]).get("usage") or {}
                counted = usage.get("prompt_tokens", counted)
    if first is None:
        raise SystemExit("the long prompt got no answer")
    return first, counted


@contextmanager
def arm_of(name: str, batch_tokens: int, secret_file: str) -> Iterator[str]:
    """The gateway of an arm, workers and all."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        urls = [
            stack.enter_context(worker(core=core, batch_tokens=batch_tokens, slots=SLOTS, secret_file=secret_file))
            for core in cores
        ]
        roles = {"colocated": urls} if name == "colocated" else {"prefill": urls[:1], "decode": urls[1:]}
        yield stack.enter_context(gateway(**roles))


def measure(name: str, batch_tokens: int, prompt_tokens: int, rounds: int, secret_file: str) -> list[Round]:
    with arm_of(name, batch_tokens, secret_file) as url:
        found = []
        for _ in range(rounds):
            found.append(asyncio.run(run_round(url, name, batch_tokens, prompt_tokens)))
            show(found[-1])
        return found


def show(found: Round) -> None:
    worst = "  ".join(f"{gap:6.3f}" for gap in found.worst_gap_s)
    still = "  ".join(f"{100 * ratio:4.0f} %" for ratio in found.stood_still_ratio)
    speed = found.prompt_tokens / found.ttft_s
    print(
        f"{found.arm:13} n_batch {found.batch_tokens:4}   worst gap (s) {worst}   stood still {still}"
        f"   TTFT {found.ttft_s:5.1f} s ({speed:.0f} tok/s)",
        flush=True,
    )


def worst(rounds: list[Round]) -> float:
    """The worst gap of any stream, the median over rounds."""
    return statistics.median(max(found.worst_gap_s) for found in rounds)


def best_colocated(by_batch: dict[int, list[Round]]) -> int:
    """The batch size that serves the colocated arm best."""
    ttft = {batch: statistics.median(found.ttft_s for found in rounds) for batch, rounds in by_batch.items()}
    quick = [batch for batch, seconds in ttft.items() if seconds <= min(ttft.values()) / 0.9]
    return min(quick, key=lambda batch: worst(by_batch[batch]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prompt-tokens", type=int, default=3000)
    options.add_argument("--batches", default="64,128,256,512,2048")
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as secret:
        secret.write(secrets.token_hex(16))
        secret.flush()
        apart = measure("disaggregated", DISAGGREGATED_BATCH, given.prompt_tokens, given.rounds, secret.name)
        together = {
            batch: measure("colocated", batch, given.prompt_tokens, given.rounds, secret.name)
            for batch in map(int, given.batches.split(","))
        }
    batch = best_colocated(together)
    ratio = worst(together[batch]) / worst(apart)
    print(
        f"\nworst gap: colocated {worst(together[batch]):.3f} s (its best n_batch, {batch}), "
        f"disaggregated {worst(apart):.3f} s: {ratio:.1f} times"
    )
    if given.json:
        rounds = [asdict(found) for found in (*apart, *(r for of_batch in together.values() for r in of_batch))]
        given.json.write_text(json.dumps({"best_n_batch": batch, "worst_gap_ratio": ratio, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
