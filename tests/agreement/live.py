"""The gateway itself, ports and HTTP and all, in virtual time: `python -m tests.agreement.live JOURNAL`.

The scenario comes as JSON on standard input. Its fleet is `StepEngine`s, its traffic comes from clients on connections of their
own, and what they saw goes to standard output, a row a request.
"""

from tests.agreement import virtual_time

if __name__ == "__main__":
    virtual_time.take_over()

import asyncio
import sys
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import msgspec
from tests.agreement.engine_service import LEG_HEADER, EngineService, prompt_of
from tests.agreement.seen import Seen
from tests.agreement.step_engine import StepEngine

from twinpool.config import Config, Declared, Server
from twinpool.gateway.app import Gateway
from twinpool.http1 import Deadlines, Exchange, Origin, Pool, Receiver, UpstreamLost
from twinpool.http1.framing import Headers
from twinpool.sim.fleet import MODEL, build_fleet
from twinpool.sim.loop import Loop
from twinpool.sim.run import kind_of, traffic
from twinpool.sim.scenario import Scenario
from twinpool.sim.stream_gaps import GapLimits
from twinpool.workload.offered import Offered

_CHAT = "/v1/chat/completions"


class _NumberedLegs(Pool):
    """The gateway's connections to engines: what goes over them has its number on it."""

    def __init__(self) -> None:
        super().__init__()
        self._sent = count()

    async def request(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Headers,
        body: bytes,
        receiver: Receiver,
        deadlines: Deadlines = Deadlines(),  # noqa: B008  frozen
        *,
        is_fresh: bool = False,
    ) -> Exchange:
        headers = [*headers, (LEG_HEADER, b"%d" % next(self._sent))]
        return await super().request(origin, method, target, headers, body, receiver, deadlines, is_fresh=is_fresh)


class _Client:
    """Takes one answer, and keeps the moment of each token."""

    def __init__(self) -> None:
        self.began = virtual_time.now()
        self.tokens: list[float] = []
        self.ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._status = 0

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        self.tokens += [virtual_time.now()] * data.count(b'"content":')

    def on_end(self) -> None:
        if self._status == 200:
            self.ended.set_result(virtual_time.now())
        else:
            self.ended.set_exception(RuntimeError(f"status {self._status}"))

    def on_lost(self, error: UpstreamLost) -> None:
        self.ended.set_exception(error)

    def seen(self, offered: Offered) -> Seen:
        if len(self.tokens) != offered.output_tokens:
            raise RuntimeError(f"{len(self.tokens)} tokens came of {offered.output_tokens}")
        gaps = [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]
        return Seen(
            at_s=offered.at_s,
            ttft_s=self.tokens[0] - self.began,
            e2e_s=self.ended.result() - self.began,
            gap_mean_s=sum(gaps) / len(gaps),
            gap_worst_s=max(gaps),
        )


async def _ask(pool: Pool, gateway: Origin, number: int, offered: Offered, began: float) -> Seen:
    await asyncio.sleep(began + offered.at_s - virtual_time.now())
    client = _Client()
    prompt = prompt_of(number, offered.prompt_tokens, offered.output_tokens)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = [(b"content-type", b"application/json")]
    with await pool.request(gateway, "POST", _CHAT, headers, msgspec.json.encode(body), client):
        await client.ended
    return client.seen(offered)


def _fleet(scenario: Scenario) -> list[EngineService]:
    """As the simulator would build it, with other engines inside."""
    (arm,) = scenario.all_arms()
    limits = GapLimits(scenario.objectives.slo_itl_s, 1.0)
    simulated = build_fleet(
        [kind_of(group) for group in arm.workers],
        Loop(),
        listener=None,  # type: ignore[arg-type]  # these engines never run
        meter=None,  # type: ignore[arg-type]
        gap_limits=limits,
        lease_s=scenario.gateway.lease_s,
        continues=scenario.gateway.continues,
    )
    services = [
        EngineService(
            worker.facts,
            worker.kind,
            StepEngine(worker.kind.cost, worker.engine.limits, worker.engine.slowness),
            scenario.gateway.dispatch_s,
        )
        for worker in simulated.values()
    ]
    for service in services:
        service.peers = {each.facts.worker: each for each in services}
    return services


async def play(scenario: Scenario, requests: Iterable[Offered], journal: Path) -> list[Seen]:
    config = Config(
        server=Server(port=0, admin_port=0, probe_interval_s=scenario.gateway.probe_interval_s),
        objectives=scenario.objectives,
        routing=scenario.routing,
        balance=scenario.balance,
    )
    services = _fleet(scenario)
    gateway = Gateway(config, journal=journal, pool=_NumberedLegs())
    await gateway.start()
    for service in services:
        await service.start()
        facts = service.facts
        declared = Declared(budget_tokens=facts.budget_tokens, tensor_parallel=facts.tensor_parallel)
        gateway.attach(facts.worker, service.url, facts.role, facts.allowed_roles, declared)
    await gateway.ready()
    pool = Pool()
    origin = Origin("127.0.0.1", gateway.port)
    began = virtual_time.now()
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(_ask(pool, origin, n, offered, began)) for n, offered in enumerate(requests)]
    await pool.close()
    await gateway.close()
    for service in services:
        await service.close()
    return [task.result() for task in asked]


def main() -> None:
    scenario = msgspec.json.decode(sys.stdin.buffer.read(), type=Scenario)
    requests = traffic(
        scenario.traffic,
        seed=scenario.seed,
        duration_s=scenario.duration_s,
        long_prompt_tokens=scenario.objectives.long_prompt_tokens,
    )
    with asyncio.Runner(loop_factory=virtual_time.VirtualLoop) as runner:
        seen = runner.run(play(scenario, requests, Path(sys.argv[1])))
    sys.stdout.buffer.write(msgspec.json.encode(seen))


if __name__ == "__main__":
    main()
