"""Engines that `serve` starts itself, and what running them takes: the same for our own and for vLLM's."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from twinpool.cli.fleet import ALL_ROLES, Engine
from twinpool.cli.worker import SECRET_VARIABLE
from twinpool.cli.worker_log import Terminal, WorkerLog
from twinpool.deploy.local import Deadlines
from twinpool.deploy.plan import Plan, PlannedWorker
from twinpool.deploy.process import Command
from twinpool.deploy.restarts import RestartPolicy
from twinpool.deploy.vllm import PlannedEngine, VllmPlan

VLLM_STOP_S = 8.0  # an engine that was asked to end gives up what it computes at once, and then its GPUs
SWEEP_S = 8.0  # for what is left then: to give back an engine's memory takes seconds
VLLM_START_TRIES = 2  # what fails in a minute's start is seldom chance


class Started(Protocol):
    """A fleet to be started here, by the ids of its workers."""

    @property
    def log(self) -> WorkerLog | Terminal: ...
    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def restarts(self) -> RestartPolicy: ...
    @property
    def deadlines(self) -> Deadlines: ...
    @property
    def notice(self) -> str | None:
        """What to tell a person who waits for the start, where that takes long."""

    def command(self, worker: str, exit_with_fd: int) -> Command: ...
    def engine(self, worker: str, url: str) -> Engine:
        """What the gateway is told of it, once it is ready at `url`."""


@dataclass(frozen=True, slots=True)
class Local:
    """Workers with the embedded engine. `lease_s` is what they grant a handle."""

    plan: Plan
    model_path: Path
    model_name: str
    lease_s: float
    log: WorkerLog | Terminal
    secret: str = field(repr=False)

    restarts = RestartPolicy()
    deadlines = Deadlines()
    notice = None

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(worker.id for worker in self.plan.workers)

    def command(self, worker: str, exit_with_fd: int) -> Command:
        """The secret is not on the command line: everybody on the machine can read those."""
        planned = self._planned(worker)
        argv = [sys.executable, "-P", "-m", "twinpool", "worker"]
        argv += ["--model", str(self.model_path), "--model-name", self.model_name, "--port", "0"]
        argv += ["--slots", str(planned.slots), "--context-tokens", str(planned.context_tokens)]
        argv += ["--threads", str(planned.threads), "--lease", f"{self.lease_s:g}", "--exit-with-fd", str(exit_with_fd)]
        argv += ["--cores", ",".join(map(str, planned.cores))] if planned.cores else []
        return Command(argv, {**os.environ, SECRET_VARIABLE: self.secret})

    def engine(self, worker: str, url: str) -> Engine:
        return Engine(worker, url, self._planned(worker).role, ALL_ROLES)

    def _planned(self, worker: str) -> PlannedWorker:
        return next(planned for planned in self.plan.workers if planned.id == worker)


@dataclass(frozen=True, slots=True)
class LocalVllm:
    """Stock vLLM engines. `api_key` is what they ask for; `start_s` how long one may take until it is healthy."""

    plan: VllmPlan
    start_s: float
    log: WorkerLog | Terminal
    api_key: str = field(repr=False)

    restarts = RestartPolicy(start_tries=VLLM_START_TRIES)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(engine.id for engine in self.plan.engines)

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(start_s=self.start_s, stop_s=VLLM_STOP_S + SWEEP_S)

    @property
    def notice(self) -> str:
        where = f"; their messages: {self.log.path}" if self.log.path else ""
        return f"starting {len(self.ids)} vLLM engines, which takes a minute at least, and long for a large model{where}"

    def command(self, worker: str, exit_with_fd: int) -> Command:
        planned = self._planned(worker)
        guard = [sys.executable, "-P", "-m", "twinpool.deploy.guard", str(exit_with_fd), planned.url, f"{VLLM_STOP_S:g}"]
        return Command([*guard, *planned.argv], {**os.environ, **planned.env, "VLLM_API_KEY": self.api_key})

    def engine(self, worker: str, url: str) -> Engine:
        planned = self._planned(worker)
        return Engine(worker, url, planned.role, planned.allowed_roles, planned.declared)

    def _planned(self, worker: str) -> PlannedEngine:
        return next(planned for planned in self.plan.engines if planned.id == worker)
