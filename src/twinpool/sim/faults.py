"""What goes wrong, and somebody's hand on the admin port: each fault of a scenario at its moment, to the worker it names."""

from collections.abc import Iterable
from typing import NamedTuple

from twinpool.core import events as on
from twinpool.errors import UserError
from twinpool.sim.driver import Driver
from twinpool.sim.loop import Loop, Rank
from twinpool.sim.scenario import Fault, FaultKind


class _End(NamedTuple):
    fault: Fault
    incarnation: int


class Faults:
    """Puts the faults of a scenario on the loop."""

    def __init__(self, loop: Loop, driver: Driver, probe_interval_s: float) -> None:
        self._loop = loop
        self._driver = driver
        self._probe_interval_s = probe_interval_s

    def expect(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            if fault.worker not in self._driver.workers:
                raise UserError(f"a fault names the worker {fault.worker!r}; there are {', '.join(self._driver.workers)}")
            self._loop.call_at(fault.at_s, Rank.FAULT, self._strike, fault)

    def _strike(self, at: float, fault: Fault) -> None:
        worker = self._driver.workers[fault.worker]
        feed = self._driver.feed
        if fault.kind is FaultKind.CRASH:
            if not worker.is_up:
                return
            worker.is_up = False
            for sequence in worker.engine.halt(at):
                self._driver.broke(at, sequence)
            self._loop.call_at(at + self._probe_interval_s, Rank.PROBE, self._driver.probe, fault.worker)
        elif fault.kind is FaultKind.SLOW:
            worker.engine.slowness *= fault.factor
        elif fault.kind is FaultKind.SLOW_LINK:
            for port in worker.ports:
                port.bytes_per_s /= fault.factor
        elif fault.kind is FaultKind.LOST:
            feed(on.WorkerLost(at=at, worker=fault.worker, reason="no answer"))
        elif fault.kind is FaultKind.DRAIN:
            feed(on.DrainAsked(at=at, worker=fault.worker))
            return
        elif fault.role is not None:
            feed(on.RoleAsked(at=at, worker=fault.worker, role=fault.role))
            return
        self._loop.call_at(at + fault.lasts_s, Rank.FAULT, self._pass, _End(fault, worker.incarnation))

    def _pass(self, at: float, end: _End) -> None:
        fault, incarnation = end
        worker = self._driver.workers[fault.worker]
        if fault.kind is FaultKind.CRASH:
            worker.restart()
        elif worker.incarnation != incarnation and fault.kind is FaultKind.SLOW:
            return  # the slow engine is gone
        elif fault.kind is FaultKind.SLOW:
            worker.engine.slowness /= fault.factor
        elif fault.kind is FaultKind.SLOW_LINK:
            for port in worker.ports:
                port.bytes_per_s *= fault.factor
        else:
            self._driver.probe(at, fault.worker)
