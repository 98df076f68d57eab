"""The gateway in virtual time while traffic turns: `python -m tests.agreement.shift MODE JOURNAL`.

    60 s of long prompts with short answers | 60 s of short prompts with long answers | 60 s of long prompts again

Three workers of one kind that may take either role, one prefill and two decode at first; four times as slow as the profile
says, so that few requests are a load, and with objectives to match. What clients saw goes to standard output.
"""

from tests.agreement import virtual_time

if __name__ == "__main__":
    virtual_time.take_over()

import asyncio
import sys
from pathlib import Path
from random import Random

import msgspec
from tests.agreement.engine_service import prompt_of, word_of
from tests.agreement.live import _fleet
from tests.agreement.shifted import Answer, Shifted, Split

from twinpool.config import BalanceMode, Declared, Objectives, Server, load
from twinpool.core.model import Role
from twinpool.gateway.app import Gateway
from twinpool.http1 import Origin, Pool, UpstreamLost
from twinpool.sim.fleet import MODEL
from twinpool.sim.scenario import Gateway as Dispatch
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson
from twinpool.workload.lengths import Uniform
from twinpool.workload.mixes import Mix, Part
from twinpool.workload.offered import Offered, offered

_SLOWNESS = 4.0
_OBJECTIVES = Objectives(slo_ttft_s=1.3 * _SLOWNESS, slo_itl_s=0.05 * _SLOWNESS)
_PHASE_S = 60.0
_PROMPTS = (Poisson(rate=2.2), Mix(parts=(Part(share=1.0, prompt=Uniform(2000, 5000), output=Uniform(5, 15)),)))
_ANSWERS = (Poisson(rate=3.0), Mix(parts=(Part(share=1.0, prompt=Uniform(100, 300), output=Uniform(150, 300)),)))


def _group(count: int, role: Role) -> WorkerGroup:
    return WorkerGroup(
        count=count, role=role, profile="llama-3.1-70b-h100-tp8", budget_tokens=2048, sequences=24, slowness=_SLOWNESS
    )


def _requests() -> list[Offered]:
    rng = Random(8)
    found = []
    for phase, (arrivals, mix) in enumerate((_PROMPTS, _ANSWERS, _PROMPTS)):
        drawn = offered(arrivals, mix, Random(rng.getrandbits(64)), duration_s=_PHASE_S)
        found += [msgspec.structs.replace(each, at_s=each.at_s + phase * _PHASE_S) for each in drawn]
    return found


class _Client:
    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.first: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        if self.first is None and b'"content":' in data:
            self.first = virtual_time.now()
        self.body += data

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_lost(self, error: UpstreamLost) -> None:
        self.ended.set_exception(error)


async def _ask(pool: Pool, gateway: Origin, number: int, asked: Offered, began: float) -> Answer:
    await asyncio.sleep(began + asked.at_s - virtual_time.now())
    client = _Client()
    prompt = prompt_of(number, asked.prompt_tokens, asked.output_tokens)
    body = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "stream": True}
    headers = [(b"content-type", b"application/json")]
    with await pool.request(gateway, "POST", "/v1/chat/completions", headers, msgspec.json.encode(body), client):
        await client.ended
    events = [line[6:] for line in bytes(client.body).split(b"\n\n") if line]
    choices = [msgspec.json.decode(event)["choices"][0] for event in events[:-1]]
    said = "".join(choice["delta"].get("content", "") for choice in choices)
    told = "".join(word_of(prompt, n) for n in range(1, asked.output_tokens + 1))
    return Answer(
        at_s=asked.at_s,
        status=client.status,
        is_right=said == told and events[-1] == b"[DONE]",
        ttft_s=None if client.first is None else client.first - began - asked.at_s,
    )


async def _watch(gateway: Gateway, began: float) -> list[Split]:
    """Who stands where, each second."""
    seen = []
    while True:
        roles = [worker.role for worker in gateway._driver.controller.cluster]
        seen.append(Split(virtual_time.now() - began, roles.count(Role.PREFILL), roles.count(Role.DECODE)))
        if len(seen) > 3 * _PHASE_S:
            return seen
        await asyncio.sleep(1.0)


async def play(mode: BalanceMode, journal: Path) -> Shifted:
    config = msgspec.structs.replace(load("", "", mode), server=Server(port=0, admin_port=0), objectives=_OBJECTIVES)
    services = _fleet(
        Scenario(
            name="shift",
            traffic=TrafficSpec(mix=msgspec.to_builtins(_PROMPTS[1]), arrivals=_PROMPTS[0]),
            duration_s=_PHASE_S,
            objectives=_OBJECTIVES,
            routing=config.routing,
            balance=config.balance,
            gateway=Dispatch(dispatch_s=0.001),
            workers=(_group(1, Role.PREFILL), _group(2, Role.DECODE)),
        )
    )
    gateway = Gateway(config, journal=journal)
    await gateway.start()
    for service in services:
        await service.start()
        facts = service.facts
        declared = Declared(budget_tokens=facts.budget_tokens, tensor_parallel=facts.tensor_parallel)
        gateway.attach(facts.worker, service.url, facts.role, (Role.PREFILL, Role.DECODE), declared)
    await gateway.ready()
    pool = Pool()
    origin = Origin("127.0.0.1", gateway.port)
    began = virtual_time.now()
    async with asyncio.TaskGroup() as tasks:
        watched = tasks.create_task(_watch(gateway, began))
        asked = [tasks.create_task(_ask(pool, origin, n, each, began)) for n, each in enumerate(_requests())]
    decisions = gateway._driver.decisions
    metrics = gateway._metrics.render().decode()
    named = {line.split()[2] for line in metrics.splitlines() if line.startswith("# TYPE")}
    outcome = Shifted(
        answers=[task.result() for task in asked],
        splits=watched.result(),
        decisions=decisions.recent(10_000),
        regret_s=decisions.regret_s,
        balance=gateway._driver.balances.recent(1000),
        metrics=sorted(name for name in named if not name.endswith("_created")),  # only those that were counted have these
    )
    await pool.close()
    await gateway.close()
    for service in services:
        await service.close()
    return outcome


def main() -> None:
    with asyncio.Runner(loop_factory=virtual_time.VirtualLoop) as runner:
        outcome = runner.run(play(BalanceMode(sys.argv[1]), Path(sys.argv[2])))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
