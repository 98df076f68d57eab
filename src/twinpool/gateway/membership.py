"""Who the workers are, and whether they are well: a task a worker that probes it.

A worker joins when a probe finds it, is lost when it refuses connections or has been silent for several probes, and joins
again when it answers. The controller may ask for a probe at once when a connection broke; a worker that was only busy is back
within a millisecond. Probes never touch the counts of what runs.
"""

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic
from urllib.parse import urlsplit

import aiohttp
import msgspec

from twinpool.config import Declared, Server, Timeouts
from twinpool.core import events as on
from twinpool.core.cluster import Worker
from twinpool.core.lifecycle import WorkerState
from twinpool.core.model import Role
from twinpool.engines.facts import facts_of
from twinpool.engines.metrics import EngineMetrics, scrape
from twinpool.engines.probe import Identity, Kind, ProbeError, Trouble, probe
from twinpool.errors import UserError
from twinpool.gateway.driver import Driver
from twinpool.http1 import Origin
from twinpool.measure.leaks import LeakWatch

_LEAK_SETTLE_S = 60.0  # twice the lease of a stock vLLM: others may hold handles there too
_SILENT_PROBES = 3  # a worker under full load may be late for one or two
_NEARLY_FULL = 0.9  # of its KV: from here on each look is told, for routing asks how fresh it is
_NOTED_CHANGE = 0.05  # below it, what has changed since: a steady engine fills no journal
_FIRST_PROBES_S = 0.1  # while it is not up: it was just started, and someone waits


class Member:
    """A worker that we know of, up or not. `trouble` says why it is not, `trouble_kind` the same as one of a few reasons;
    `kind` is what it was when it was last up. `api_key` is sent with every request to it."""

    def __init__(
        self,
        worker: str,
        url: str,
        role: Role,
        allowed_roles: tuple[Role, ...],
        declared: Declared = Declared(),  # noqa: B008  frozen
        api_key: str | None = None,
    ) -> None:
        self.worker = worker
        self.url = url.removesuffix("/")
        self.origin = parse_origin(url, api_key)
        self.headers = {name.decode(): value.decode() for name, value in self.origin.headers}
        self.role = role
        self.allowed_roles = allowed_roles
        self.declared = declared
        self.kind: Kind | None = None
        self.trouble: str | None = "not probed yet"
        self.trouble_kind: Trouble | None = None
        self.warning: str | None = None  # it is up, and something is wrong with it all the same
        self.leaks = LeakWatch(_LEAK_SETTLE_S)
        self.kv_used_told = 0.0
        self.failures = 0
        self.nudge = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


def parse_origin(url: str, api_key: str | None = None) -> Origin:
    """`http://host:port`, and the key for whoever listens there; raises `UserError` for what is no such URL."""
    wrong = UserError(f"{url!r} is not the address of a worker: write http://HOST:PORT")
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        raise wrong from None
    is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
    is_clean = url.isprintable() and " " not in url  # what is no part of an address is dropped without a word, else
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_bare or not is_clean:
        raise wrong
    headers = () if api_key is None else ((b"authorization", b"Bearer " + api_key.encode()),)
    return Origin(parts.hostname, port, parts.scheme == "https", headers)


class Membership:
    """All members, by id."""

    def __init__(self, driver: Driver, server: Server, timeouts: Timeouts, on_change: Callable[[], None]) -> None:
        self._driver = driver
        self._interval_s = server.probe_interval_s
        self._timeout_s = timeouts.probe_s
        self._on_change = on_change
        self._members: dict[str, Member] = {}
        self._session: aiohttp.ClientSession | None = None
        driver.probe_now = self.probe_now
        driver.scrape = self.scrape

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, worker: str) -> Member | None:
        return self._members.get(worker)

    def models(self) -> list[str]:
        """What workers that are up serve, each once."""
        return list(dict.fromkeys(model for worker in self._up() for model in worker.facts.models))

    def only_model(self) -> str | None:
        """The model that is meant where none is named; None where there are several, or none."""
        found = {model for worker in self._up() for model in worker.facts.models if model not in worker.facts.loras}
        return found.pop() if len(found) == 1 else None

    def parent(self, model: str) -> str | None:
        """The model that this adapter stands on, where it is one."""
        for worker in self._up():
            if model in worker.facts.loras:
                return next((base for base in worker.facts.models if base not in worker.facts.loras), None)
        return None

    def _up(self) -> Iterator[Worker]:
        return (worker for worker in self._driver.controller.cluster if worker.story.state is not WorkerState.LOST)

    def attach(self, member: Member) -> None:
        """Know this worker, and probe it until it is up. The same id at another address takes the old one's place."""
        known = self._members.get(member.worker)
        if known is not None and known.task is not None:
            if known.url == member.url:
                return
            known.task.cancel()
        self._members[member.worker] = member
        self._driver.place(member.worker, member.origin)
        member.task = asyncio.get_running_loop().create_task(self._watch(member), name=f"probe {member.worker}")

    def detach(self, worker: str) -> None:
        member = self._members.pop(worker, None)
        if member is not None and member.task is not None:
            member.task.cancel()
        self._driver.histories.forget(worker)
        self._driver.cache_epochs.forget(worker)
        self._driver.feed(on.WorkerRemoved(at=monotonic(), worker=worker))
        self._on_change()

    def exited(self, worker: str) -> None:
        """Its process has ended: nobody needs to be asked."""
        member = self._members.get(worker)
        if member is not None:
            self._lost(member, "its process has ended", Trouble.UNREACHABLE)

    async def scrape(self, worker: str) -> EngineMetrics:
        """The worker's own counts now; raises `ProbeError` where they cannot be had, `KeyError` for an unknown worker."""
        member = self._members[worker]
        return await scrape(self._http(), member.url, self._timeout_s, member.headers)

    def connection_lost(self, origin: Origin) -> None:
        """An engine closed a connection that rested: it may have restarted, which is looked at now."""
        for member in self._members.values():
            if member.origin == origin:
                self._driver.histories.was_away(member.worker, monotonic())
                member.nudge.set()

    def probe_now(self, worker: str) -> None:
        member = self._members.get(worker)
        if member is not None:
            member.nudge.set()

    async def close(self) -> None:
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    async def _watch(self, member: Member) -> None:
        while True:
            await self._probe(member)
            is_up = member.trouble is None
            try:
                async with asyncio.timeout(self._interval_s if is_up else min(self._interval_s, _FIRST_PROBES_S)):
                    await member.nudge.wait()
            except TimeoutError:
                pass
            member.nudge.clear()

    async def _probe(self, member: Member) -> None:
        try:
            identity = await probe(self._http(), member.url, self._timeout_s, headers=member.headers, expected=member.kind)
        except ProbeError as error:
            member.failures += 1
            self._driver.histories.was_away(member.worker, monotonic())
            is_certain = error.trouble in (Trouble.UNREACHABLE, Trouble.AUTH)
            if is_certain or member.failures >= _SILENT_PROBES or member.trouble is not None:
                self._lost(member, str(error), error.trouble)
            return
        member.failures = 0
        self._found(member, identity)
        if identity.metrics is not None:
            self._driver.histories.note(member.worker, monotonic(), identity.metrics)
            self._tell_load(member, identity.metrics)
            self._look_for_leaks(member, identity.metrics)

    def _tell_load(self, member: Member, metrics: EngineMetrics) -> None:
        """How full it says it is: others may use it too."""
        used = metrics.kv_usage_ratio
        if used is None or (used < _NEARLY_FULL and abs(used - member.kv_used_told) < _NOTED_CHANGE):
            return
        member.kv_used_told = used
        self._driver.feed(
            on.LoadReported(
                at=monotonic(), worker=member.worker, running=metrics.running, waiting=metrics.waiting, kv_used_ratio=used
            )
        )

    def _look_for_leaks(self, member: Member, metrics: EngineMetrics) -> None:
        """An engine that has lost KV gets nothing new, where another can do its work: only a restart gives it back."""
        controller = self._driver.controller
        worker = controller.cluster.get(member.worker)
        if worker is None:
            return
        is_idle = not (metrics.running or metrics.waiting or worker.sequences or controller.holds_handles(member.worker))
        suspected = member.leaks.look(monotonic(), is_idle=is_idle, kv_usage_ratio=metrics.kv_usage_ratio)
        if not suspected:
            member.warning = None
            return
        if member.warning is None:
            used = metrics.kv_usage_ratio or 0.0
            member.warning = f"{used:.0%} of its KV is in use while nothing runs there: restart it"
            others = [w for w in controller.cluster if w is not worker and w.story.state is WorkerState.READY]
            if any(set(worker.facts.models) <= set(other.facts.models) for other in others):
                self._driver.feed(on.DrainAsked(at=monotonic(), worker=member.worker))
            self._on_change()

    def _found(self, member: Member, identity: Identity) -> None:
        known = self._driver.controller.cluster.get(member.worker)
        is_steady = known is not None and known.story.state is not WorkerState.LOST
        if known is not None and is_steady and not identity.incarnation:  # a page without a start says nothing of another one
            identity = msgspec.structs.replace(identity, incarnation=known.facts.incarnation)
        facts = facts_of(member.worker, member.url, member.role, member.allowed_roles, identity, member.declared)
        member.kind = identity.kind
        member.trouble_kind = None
        member.trouble = None
        if known is None or known.facts != facts or known.story.state is WorkerState.LOST:
            self._driver.feed(on.WorkerJoined(at=monotonic(), facts=facts))
            self._on_change()

    def _lost(self, member: Member, reason: str, kind: Trouble) -> None:
        was_up = member.trouble is None
        member.trouble = reason
        member.trouble_kind = kind
        if was_up:
            is_gone = kind is Trouble.UNREACHABLE
            self._driver.feed(on.WorkerLost(at=monotonic(), worker=member.worker, reason=reason, is_gone=is_gone))
            self._on_change()
