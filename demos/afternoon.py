"""A quarter of an hour of a service whose traffic shifts, in a minute or two: `python -m demos.afternoon SECONDS`.

The real gateway, HTTP and all, in virtual time, before four workers that take as long as Llama 3.1 70B does on four H100s each
(twice as long: fewer tokens tell the same story). Five minutes of long prompts, five of long answers, and long prompts again;
`--balance auto` moves the workers. What its admin port says at the end goes to standard output: `{path: answer}`.
"""

from tests.agreement import virtual_time

if __name__ == "__main__":
    virtual_time.take_over()

import asyncio
import sys

import msgspec
from tests.agreement.live import _ask, _fleet

from twinpool.config import Balance, BalanceMode, Config, Declared, Routing, RoutingPolicy, Server
from twinpool.core.model import Role
from twinpool.gateway.app import Gateway
from twinpool.http1 import Origin, Pool
from twinpool.sim.run import traffic
from twinpool.sim.scenario import Scenario, TrafficSpec, WorkerGroup
from twinpool.workload.arrivals import Poisson
from twinpool.workload.lengths import Exactly, Uniform
from twinpool.workload.mixes import Swing, short_and_long

PATHS = ("admin/state", "admin/decisions?limit=10", "admin/history")
LONG_PROMPTS = short_and_long(0.6, output=Exactly(60))
LONG_ANSWERS = short_and_long(0.1, output=Uniform(350, 650))
SHIFTS_EVERY_S = 300.0


def _workers(count: int, role: Role) -> WorkerGroup:
    profile = "llama-3.1-70b-h100-tp4"
    return WorkerGroup(count=count, role=role, profile=profile, allowed_roles=(Role.PREFILL, Role.DECODE), slowness=2.0)


SCENE = Scenario(
    name="afternoon",
    traffic=TrafficSpec(
        mix=msgspec.to_builtins(Swing(one=LONG_PROMPTS, other=LONG_ANSWERS, every_s=SHIFTS_EVERY_S)),
        arrivals=Poisson(rate=6.6),
    ),
    duration_s=3600.0,
    workers=(_workers(2, Role.PREFILL), _workers(2, Role.DECODE)),
)


class _Answer:
    """Takes one answer whole."""

    def __init__(self) -> None:
        self.body = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        pass

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_lost(self, error: Exception) -> None:
        self.ended.set_exception(error)


async def _look(pool: Pool, admin: Origin, path: str) -> msgspec.Raw:
    answer = _Answer()
    with await pool.request(admin, "GET", f"/{path}", [], b"", answer):
        await answer.ended
    return msgspec.Raw(answer.body)


async def _play(seconds: float) -> dict[str, msgspec.Raw]:
    config = Config(
        server=Server(port=0, admin_port=0),
        routing=Routing(policy=RoutingPolicy.LEAST_COST),
        balance=Balance(mode=BalanceMode.AUTO),
    )
    gateway = Gateway(config)
    await gateway.start()
    services = _fleet(SCENE)
    for number, service in enumerate(services):
        await service.start()
        facts = service.facts
        declared = Declared(budget_tokens=facts.budget_tokens, tensor_parallel=facts.tensor_parallel)
        gateway.attach(f"h100-{number}", service.url, facts.role, facts.allowed_roles, declared)
    await gateway.ready()
    pool = Pool()
    clients: set[asyncio.Task[object]] = set()
    began = virtual_time.now()
    requests = traffic(
        SCENE.traffic, seed=SCENE.seed, duration_s=seconds, long_prompt_tokens=SCENE.objectives.long_prompt_tokens
    )
    for number, offered in enumerate(requests):
        await asyncio.sleep(began + offered.at_s - virtual_time.now())
        asking = asyncio.create_task(_ask(pool, Origin("127.0.0.1", gateway.port), number, offered, began))
        clients.add(asking)
        asking.add_done_callback(clients.discard)
    seen = {path: await _look(pool, Origin("127.0.0.1", gateway.admin_port), path) for path in PATHS}
    await asyncio.gather(*clients)
    await pool.close()
    await gateway.close()
    for service in services:
        await service.close()
    return seen


def main() -> None:
    with asyncio.Runner(loop_factory=virtual_time.VirtualLoop) as runner:
        seen = runner.run(_play(float(sys.argv[1])))
    sys.stdout.buffer.write(msgspec.json.encode(seen))


if __name__ == "__main__":
    main()
