"""Runs a gateway and, where asked for, its workers, until somebody asks it to stop.

workers spawned ──▶ gateway listens ──▶ each worker attached when it says ready ──▶ first screen
                                                                                        │ Ctrl-C, SIGTERM
workers ended   ◀── gateway closed, running answers done ◀──────────────────────────────┘
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinpool.cli.fleet import Engine
from twinpool.cli.prepare import Service
from twinpool.cli.signals import first_of, listen_for_stop
from twinpool.cli.started import LocalVllm, Started
from twinpool.cli.state import fetch_state
from twinpool.core.model import Role
from twinpool.deploy.local import Ended, Hooks, Supervisor
from twinpool.deploy.process import Ready

if TYPE_CHECKING:
    from twinpool.gateway.app import Gateway

ENGINES_WAIT_S = 10.0  # for engines that run already: one that is down now must not keep the others' screen back
ENGINES_POLL_S = 0.5
REFUSED = 2  # the exit code of a `UserError`


@dataclass(slots=True)
class Running:
    """One service while it runs. `say` takes news for the person at the terminal, `show` the state when it is ready. The end of
    file at `exit_with_fd`, whose other end a parent holds, is the end of the service."""

    service: Service
    say: Callable[[str], None]
    show: Callable[[str, Mapping[str, Any]], None]
    exit_with_fd: int | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _supervisor: Supervisor | None = None
    _gateway: "Gateway | None" = None
    _awaited: set[str] = field(default_factory=set)
    _all_attached: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Returns after an orderly end. Raises `UserError` when a port is taken or a worker cannot be started."""
        listen_for_stop(self._stop, self._on_stop_asked, self._end_at_once)
        if self.exit_with_fd is not None:
            asyncio.get_running_loop().add_reader(self.exit_with_fd, self._on_parent_gone, self.exit_with_fd)
        async with self._workers():
            self._gateway = self._make_gateway()
            try:
                await self._gateway.start()
                await first_of(self._until_ready(self._gateway), *self._ends())
                if not self._stop.is_set():
                    self.show(self._admin_url(self._gateway), await self._state(self._gateway))
                await first_of(*self._ends())
            finally:
                await self._gateway.close()

    def _make_gateway(self) -> "Gateway":
        from twinpool.gateway.app import Gateway  # only now: the workers load their model meanwhile

        service = self.service
        return Gateway(
            service.config,
            api_keys=service.api_keys,
            admin_token=service.admin_token,
            engine_key=service.engine_key,
            journal=service.journal,
            access_log=service.access_log,
            learnt=service.learnt,
            say=self.say,
        )

    @asynccontextmanager
    async def _workers(self) -> AsyncIterator[None]:
        started = self._started
        if started is None:
            yield
            return
        if started.notice is not None:
            self.say(started.notice)
        self._awaited = set(started.ids)
        hooks = Hooks(self._on_ready, self._on_end, started.log.write)
        supervisor = Supervisor(started.ids, started.command, hooks, restarts=started.restarts, deadlines=started.deadlines)
        async with supervisor as self._supervisor:
            await asyncio.sleep(0)  # one turn of the loop, in which every worker is spawned
            yield

    @property
    def _started(self) -> Started | None:
        fleet = self.service.fleet
        return None if isinstance(fleet, tuple) else fleet

    def _on_ready(self, worker: str, ready: Ready) -> None:
        if self._gateway is None or self._started is None:
            raise RuntimeError("a worker was ready before the gateway was made")
        self._attach(self._gateway, self._started.engine(worker, ready.url))
        self._awaited.discard(worker)
        if not self._awaited:
            if self._all_attached.is_set():
                self.say(f"{worker} is back")
            self._all_attached.set()

    def _on_end(self, ended: Ended) -> None:
        if self._gateway is not None:
            self._gateway.worker_exited(ended.worker)
        if self._is_news(ended):
            self.say(str(ended))
            if isinstance(self.service.fleet, LocalVllm):  # a stranger's program: its own words tell more than one of them
                for line in ended.lines:
                    self.say(f"  | {line}")

    def _is_news(self, ended: Ended) -> bool:
        """A refused start (exit code 2) is tried again in silence: at last it works, or its reason ends the service."""
        was_refused = ended.code == REFUSED and ended.worker in self._awaited
        return not self._stop.is_set() and not was_refused

    async def _until_ready(self, gateway: "Gateway") -> None:
        engines = self.service.fleet
        if not isinstance(engines, tuple):
            await self._all_attached.wait()
            await gateway.ready()
            return
        for engine in engines:
            self._attach(gateway, engine)
        try:
            await asyncio.wait_for(gateway.ready(), ENGINES_WAIT_S)
        except TimeoutError:
            await self._until_one_is_up(gateway)

    def _attach(self, gateway: "Gateway", engine: Engine) -> None:
        allowed_roles = tuple(Role(role) for role in engine.allowed_roles)
        key = self.service.engine_keys.get(engine.id)
        gateway.attach(engine.id, engine.url, Role(engine.role), allowed_roles, engine.declared, key)

    async def _until_one_is_up(self, gateway: "Gateway") -> None:
        state = await self._state(gateway)
        for worker in state["workers"]:
            if worker["state"] != "ready":
                self.say(f"waiting for {worker['id']} at {worker['url']}: {worker['reason']}")
        while not state["gateway"]["models"]:
            await asyncio.sleep(ENGINES_POLL_S)
            state = await self._state(gateway)

    async def _state(self, gateway: "Gateway") -> dict[str, Any]:
        """As `twinpool status` sees it, over the admin port: what is shown is what can be reached."""
        return await asyncio.to_thread(fetch_state, self._admin_url(gateway), self.service.admin_token)

    def _admin_url(self, gateway: "Gateway") -> str:
        host = self.service.config.server.admin_host
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104  # not bound
        return f"http://{shown}:{gateway.admin_port}"

    def _ends(self) -> list[Any]:
        """What ends the service: a signal, or a worker that cannot be started."""
        return [self._stop.wait(), *([self._supervisor.failed()] if self._supervisor else [])]

    def _on_stop_asked(self) -> None:
        self.say("stopping: running answers may finish; Ctrl-C again ends at once")

    def _on_parent_gone(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        self._stop.set()

    def _end_at_once(self) -> None:
        if self._supervisor is not None:
            self._supervisor.kill()
