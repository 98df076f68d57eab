"""What the load client itself costs: requests a second that one core can offer, and how late they are sent.

A scripted engine (a process of its own, on another core where there is one) answers with streams of a few tokens. For each
rate: how late requests were sent, and the share of a core that sending and reading them took.

    python benchmarks/load_client.py [--rates 100,500,1000] [--duration 20] [--output-tokens 8]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from random import Random

import uvloop

from twinpool.bench.load import Generator
from twinpool.bench.prepare import prepare
from twinpool.bench.run import offer
from twinpool.bench.target import target_of
from twinpool.config import Objectives
from twinpool.http1 import Pool
from twinpool.workload.arrivals import Poisson
from twinpool.workload.lengths import Exactly
from twinpool.workload.mixes import Mix, Part
from twinpool.workload.offered import offered


@contextlib.contextmanager
def engine(core: int) -> Iterator[str]:
    argv = [sys.executable, "-m", "twinpool.engines.scripted", "--token-interval-s", "0.02"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            os.sched_setaffinity(process.pid, {core})
            if process.stdout is None or not (line := process.stdout.readline()):
                raise SystemExit("the scripted engine did not start")
            yield str(json.loads(line)["url"])
        finally:
            process.terminate()


async def measure(url: str, rate: float, duration_s: float, output_tokens: int) -> Generator:
    mix = Mix(parts=(Part(share=1, prompt=Exactly(300), output=Exactly(output_tokens)),))
    pool = Pool()
    try:
        prepared = await prepare(pool, target_of(url), None, timeout_s=10)
        requests = offered(Poisson(rate=rate), mix, Random(1), duration_s=duration_s)
        found = await offer(pool, prepared, requests, duration_s=duration_s, timeout_s=60, objectives=Objectives())
        return found.generator
    finally:
        await pool.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rates", default="100,500,1000")
    options.add_argument("--duration", type=float, default=20.0)
    options.add_argument("--output-tokens", type=int, default=8)
    given = options.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    print(f"{'rate':>6}  {'sent/s':>7}  {'lag p50':>8}  {'lag p99':>8}  {'core':>5}  µs a request  says")
    with engine(cores[0]) as url:
        for rate in map(float, given.rates.split(",")):
            found = uvloop.run(measure(url, rate, given.duration, given.output_tokens))
            cost_us = found.cpu_share * found.planned_s / max(found.sent, 1) * 1e6
            lags = f"{found.lag_p50_s * 1e3:>5.1f} ms  {found.lag_p99_s * 1e3:>5.1f} ms"
            sent = f"{rate:>6g}  {found.sent / found.planned_s:>7.1f}"
            says = found.complaint or "kept its schedule"
            print(f"{sent}  {lags}  {found.cpu_share:>5.0%}  {cost_us:>12.0f}  {says}", flush=True)


if __name__ == "__main__":
    main()
