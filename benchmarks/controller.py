"""What the controller costs: CPU microseconds a request, for all its events.

Requests live side by side as in a busy service: each round starts a batch, then takes every one of them through the events of
its path. Half the workers prefill and half decode (nixl), or all are colocated. The design's budget is 40 µs at 8 workers and
150 µs at 64. Then what a snapshot costs the event loop, with 1,000 requests that live.

    python benchmarks/controller.py [--workers 8,64] [--requests 2000] [--rounds 15]
"""

import argparse
import statistics
from collections.abc import Iterator
from time import perf_counter, process_time

from twinpool import __version__
from twinpool.assemble import build_controller
from twinpool.config import Routing, RoutingPolicy
from twinpool.core.controller import Controller
from twinpool.core.events import (
    Event,
    FirstTokenArrived,
    PrefillFinished,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
)
from twinpool.core.journal import Header, encode_header
from twinpool.core.law import CostPrior, Law
from twinpool.core.model import Dialect, RequestFacts, Role, Usage, WorkerFacts
from twinpool.measure.timeline import Timeline

BUDGET_US = {8: 40.0, 64: 150.0}
AT_ONCE_PER_WORKER = 4
FACTS = RequestFacts(model="m", endpoint="chat", stream=True, prompt_chars=800)
USAGE = Usage(prompt_tokens=200, completion_tokens=100)


PRIOR = CostPrior(
    read_s=0.0,
    read_token_s=4e-5,
    read_pair_s=3e-10,
    step_s=0.01,
    step_sequence_s=2e-5,
    step_kv_token_s=1.4e-8,
    mixed_s=-0.003,
    mixed_token_s=3.8e-5,
)
"""An 8-GPU worker's: with it every way is weighed from the first request on."""


def _rules(path: str) -> Routing:
    return Routing(policy=RoutingPolicy.LEAST_COST if path == "weighed" else RoutingPolicy.LEAST_LOADED)


def fleet(path: str, size: int) -> Controller:
    controller = build_controller(_rules(path), law=Law(priors={"": PRIOR} if path == "weighed" else {}))
    for n in range(size):
        role = Role.COLOCATED if path == "colocated" else (Role.PREFILL if n % 2 else Role.DECODE)
        facts = WorkerFacts(
            worker=f"w{n:03}",
            url=f"http://w{n:03}.example",
            incarnation="1",
            engine="none",
            models=("m",),
            role=role,
            allowed_roles=(role,),
            dialect=Dialect.NIXL,
            slots=64,
            vouches=True,  # every pair may hand over from the start: a canary is no cost of a request
        )
        controller.handle(WorkerJoined(at=0.0, facts=facts))
    return controller


def events(path: str, first: int, at_once: int) -> Iterator[Event]:
    """All events of `at_once` requests that live at the same time."""
    names = [f"r{n}" for n in range(first, first + at_once)]
    at = first / 1000
    timeline = Timeline(arrived=at, ended=at)
    for name in names:
        yield RequestArrived(at=at, request=name, facts=FACTS)
    if path != "colocated":
        for name in names:
            yield PrefillFinished(at=at, request=name, attempt=1, prompt_tokens=200)
    for name in names:
        yield FirstTokenArrived(at=at, request=name, attempt=1)
    for name in names:
        yield RequestFinished(at=at, request=name, attempt=1, timeline=timeline, usage=USAGE)


def round_us(path: str, size: int, requests: int) -> float:
    """CPU microseconds a request, building the events not counted."""
    controller = fleet(path, size)
    at_once = AT_ONCE_PER_WORKER * size
    told = [event for first in range(0, requests, at_once) for event in events(path, first, at_once)]
    begun = process_time()
    for event in told:
        controller.handle(event)
    spent_s = process_time() - begun
    if controller.live_requests:
        raise RuntimeError(f"{controller.live_requests} requests have not ended")
    per_request = len(told) // (3 if path == "colocated" else 4)
    return spent_s / per_request * 1e6


def snapshot_ms(rounds: int) -> tuple[list[float], int]:
    """Milliseconds to encode the header of a journal's next file, and its bytes; two requests in three stream."""
    controller, live = fleet("disaggregated", 64), 1000
    told = list(events("disaggregated", 0, live))
    for event in told[: 2 * live + 2 * live // 3]:
        controller.handle(event)
    if controller.live_requests != live:
        raise RuntimeError(f"{controller.live_requests} live requests")
    spent = []
    for _ in range(rounds):
        begun = perf_counter()
        header = encode_header(Header(version=__version__, rules=Routing(), snapshot=controller.remember()))
        spent.append((perf_counter() - begun) * 1e3)
    return spent, len(header)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,64")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{'workers':>7}  {'path':13}  {'median µs':>9}  {'best':>6}  {'worst':>6}  budget")
    for size in (int(text) for text in options.workers.split(",")):
        for path in ("weighed", "disaggregated", "colocated"):
            rounds = [round_us(path, size, options.requests) for _ in range(options.rounds)]
            budget = BUDGET_US.get(size)
            print(
                f"{size:>7}  {path:13}  {statistics.median(rounds):>9.1f}  {min(rounds):>6.1f}  {max(rounds):>6.1f}  "
                f"{'' if budget is None else f'{budget:.0f}'}"
            )
    spent, size = snapshot_ms(20 * options.rounds)
    print(f"snapshot of 1,000 live requests: median {statistics.median(spent):.2f} ms, best {min(spent):.2f}, {size:,} bytes")


if __name__ == "__main__":
    main()
