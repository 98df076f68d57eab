"""A planner outside the gateway, as other systems have them: looks now and then, and asks for a role over the admin port.

It sees what such a planner can scrape: the workers as the gateway knows them, how many requests wait, and what became of
those that ended. Nothing of this is the project's own way of balancing; it is here so that others' ways can be played beside
it."""

from collections.abc import Sequence
from typing import Any, Protocol

from twinpool.core import events as on
from twinpool.core.cluster import WorkerView
from twinpool.core.controller import Controller
from twinpool.core.lifecycle import WorkerState
from twinpool.core.model import Role
from twinpool.sim.client import Ended
from twinpool.sim.driver import Driver
from twinpool.sim.loop import Loop, Rank


class Planner(Protocol):
    """`look` is asked every `every_s` seconds: which worker should take which role now, if any."""

    every_s: float

    def ended(self, end: Ended) -> None: ...
    def look(self, at: float, workers: Sequence[WorkerView], waiting: int) -> tuple[str, Role] | None: ...


def call_planner(planner: Planner, loop: Loop, driver: Driver, controller: Controller) -> None:
    """From now on, as long as the simulation goes."""

    def look(at: float, _: Any) -> None:
        workers = [worker for worker in controller.cluster if worker.story.state is WorkerState.READY]
        wanted = planner.look(at, workers, controller.waiting_requests())
        if wanted is not None:
            worker, role = wanted
            driver.feed(on.RoleAsked(at=at, worker=worker, role=role))
        if driver.is_going():
            loop.call_at(at + planner.every_s, Rank.TIMER, look)

    loop.call_at(planner.every_s, Rank.TIMER, look)
