"""The live driver: feeds the controller what happens, and does what it commands.

    sockets, probes, timers ──event──► feed ──► Controller.handle ──► commands ──► legs, answers, probes
                                         └──► journal (event, commands)

Events are taken one at a time: what a command brings about while it is carried out waits its turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from twinpool.config import Timeouts
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.controller import Controller
from twinpool.core.lifecycle import PairState
from twinpool.core.model import Failure, Leg, Usage
from twinpool.engines.metrics import EngineMetrics
from twinpool.engines.probe import ProbeError
from twinpool.errors import Reason, RequestError
from twinpool.gateway.access_log import AccessLog
from twinpool.gateway.balance_state import Balances
from twinpool.gateway.cache_epochs import CacheDoubt, CacheEpochs
from twinpool.gateway.calls import ClientRequest
from twinpool.gateway.canary import Canaries
from twinpool.gateway.decision_log import DecisionLog
from twinpool.gateway.guard import Guard, Histories, Scrape
from twinpool.gateway.journal import Journal
from twinpool.gateway.legs import Legs
from twinpool.gateway.metrics import Metrics
from twinpool.gateway.openai import PATHS
from twinpool.gateway.place import Place
from twinpool.gateway.release import Read, Releases
from twinpool.gateway.role_changes import RoleChanges
from twinpool.http1 import Origin, Pool
from twinpool.measure.timeline import Timeline

_MESSAGES = {
    Reason.QUEUE_FULL: "the service is at its limit; try again later",
    Reason.QUEUE_TIMEOUT: "the request waited too long for a worker with room; try again later",
    Reason.WOULD_BE_LATE: "the answer would begin too late; try another or again later",
    Reason.DRAINING: "the service is ending; try another or again later",
    Reason.NO_WORKER: "no worker serves this model now; try again later",
    Reason.UPSTREAM_FAILED: "the engine failed while it worked on this request",
    Reason.HANDOFF_FAILED: "the KV cache could not be handed from prefill to decode; try again",
    Reason.DEADLINE_EXCEEDED: "no engine answered in time",
}

_REFUSALS = frozenset({Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT, Reason.WOULD_BE_LATE, Reason.NO_WORKER, Reason.DRAINING})
"""Ends of requests that no engine was given, or none had room for."""

_KINDS = {429: "overloaded_error", 502: "upstream_error", 503: "unavailable_error", 504: "timeout_error"}


class Driver:
    """Owns the client requests and their legs. Everything on one event loop."""

    def __init__(
        self,
        controller: Controller,
        pool: Pool,
        timeouts: Timeouts,
        metrics: Metrics,
        journal: Journal | None,
        access_log: AccessLog | None,
        *,
        expose_route: bool,
    ) -> None:
        self.controller = controller
        self.decisions = DecisionLog(metrics)
        self.balances = Balances(controller.balance_mode)
        self.role_changes = RoleChanges()
        self.say: Callable[[str], None] = lambda news: None
        self.probe_now: Callable[[str], None] = lambda worker: None
        self.scrape: Scrape = _nobody_to_ask
        self.histories = Histories()
        self.metrics = metrics
        self._journal = journal
        self._access_log = access_log
        self._guard = Guard(self.histories, self._scrape)
        self.cache_epochs = CacheEpochs(lambda news: self.say(news))
        self._canaries = Canaries(pool, controller.rules, timeouts, self.feed, self._scrape)
        self._releases = Releases(pool, timeouts.release_s, self.feed)
        self._legs = Legs(pool, timeouts, self.feed, self._releases.start, expose_route=expose_route)
        self._requests: dict[str, ClientRequest] = {}
        self._origins: dict[str, Origin] = {}
        self._events: deque[on.Event] = deque()
        self._is_feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._executors: dict[type, Callable[[Any], None]] = {
            do.RecordDecision: self._record_decision,
            do.SendPrefill: self._send_prefill,
            do.SendDecode: self._send_decode,
            do.SendWhole: self._send_whole,
            do.CancelLeg: self._cancel_leg,
            do.BreakLeg: self._break_leg,
            do.ReleaseHandle: self._release_handle,
            do.FailRequest: self._fail_request,
            do.RelayFailure: self._relay_failure,
            do.ProbeWorker: self._probe_worker,
            do.ProveHandoff: self._prove_handoff,
            do.RecordRole: self._record_role,
            do.RecordPair: self._record_pair,
            do.RecordBalance: self._record_balance,
        }

    def feed(self, event: on.Event) -> None:
        """Take in one event and carry out what follows from it."""
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._is_feeding = False
        self._set_timer()

    async def serve(self, request: ClientRequest) -> None:
        """See a client's request through to its end. Cancelling means that the client has left."""
        self._requests[request.id] = request
        self._idle.clear()
        try:
            self.metrics.indicators.arrived(request.call.facts)
            self.feed(on.RequestArrived(at=monotonic(), request=request.id, facts=request.call.facts))
            await request.ended
        except asyncio.CancelledError:
            if request.stream is None or not request.stream.client_has_all():  # else its leg sees it to its end
                self.feed(on.ClientLeft(at=monotonic(), request=request.id))
                self._end(request.id, "client_left")
            raise

    def place(self, worker: str, origin: Origin) -> None:
        """Where a worker listens."""
        self._origins[worker] = origin

    async def drain(self, within_s: float) -> None:
        """Take nothing new; return when every request has ended, or `within_s` later, when those that are left are told."""
        self.feed(on.GatewayDrained(at=monotonic()))
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            self._give_up()

    async def ask_no_more(self) -> None:
        """End what scrapes engines, before those who do that for it are closed."""
        self._give_up()
        await self._canaries.close()
        self.cache_epochs.close()
        await self._guard.close()

    async def close(self) -> None:
        """End what is left: legs, releases, the timer, the journal."""
        await self.ask_no_more()
        await self._releases.close()
        await self._legs.close()
        if self._timer is not None:  # the releases' ends may have set it anew
            self._timer.cancel()
        for record in (self._journal, self._access_log):
            if record is not None:
                await asyncio.to_thread(record.close)

    def _give_up(self) -> None:
        for request in list(self._requests.values()):
            self.feed(on.ClientLeft(at=monotonic(), request=request.id))
            request.fail(_error(503, Reason.DRAINING), request.answer_headers(with_route=False))
            self._end(request.id, "failed")

    async def _scrape(self, worker: str) -> EngineMetrics:
        return await self.scrape(worker)

    # The loop

    def _step(self, event: on.Event) -> None:
        self._judge_cache(event)  # before another leg goes to the same engine
        commands = self.controller.handle(event)
        if self._journal is not None:
            self._journal.write(event, commands)
        for command in commands:
            self._executors[type(command)](command)
        if isinstance(event, on.RequestFinished):
            self._finished(event)
        elif isinstance(event, on.FirstTokenArrived):
            self.decisions.answered(event)
        elif isinstance(event, on.LegFailed):
            self.metrics.leg_failed(event.leg, event.failure)
        elif isinstance(event, on.HandoffProved | on.HandoffNotProved):
            self.metrics.canary_ended(event)

    def _set_timer(self) -> None:
        at = self.controller.next_wakeup()
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, at - monotonic()), self._wake)

    def _wake(self) -> None:
        self._timer = self._timer_at = None
        self.feed(on.TimePassed(at=monotonic()))

    # Commands

    def _record_decision(self, command: do.RecordDecision) -> None:
        arrived = self._requests[command.request].arrived
        self.decisions.add(monotonic(), arrived, command.request, command.attempt, command.decision)

    def _send_prefill(self, command: do.SendPrefill) -> None:
        request = self._requests[command.request]
        request.begin(attempt=command.attempt, path="disaggregated", sent=monotonic(), prefill=command.worker)
        request.watch = None  # that over the attempt before has its own end
        request.read_in = self.cache_epochs.epoch_of(command.worker)
        self._legs.start_prefill(request, self._place(command.worker))
        self.metrics.indicators.leg_runs(request.legs[Leg.PREFILL], command.worker)

    def _send_decode(self, command: do.SendDecode) -> None:
        request = self._requests[command.request]
        request.decode = command.worker
        doubt = None if command.trusted_until is None else self._doubt(command, request, command.trusted_until)
        self._legs.start_decode(request, self._place(command.worker), doubt)
        self.metrics.indicators.leg_runs(request.legs[Leg.DECODE], command.worker)

    def _doubt(self, command: do.SendDecode, request: ClientRequest, trusted_until: float) -> CacheDoubt:
        sent, prefilled, read_in = request.sent, request.prefilled, request.read_in
        if sent is None or prefilled is None or read_in is None:
            raise ValueError(f"{request.id} was not prefilled")
        trust = self._guard.watch(command.prefill_worker, sent, trusted_until)
        lease_ends_by = trusted_until + self.controller.rules.lease_margin_s + prefilled - sent
        request.watch = self.cache_epochs.watch(command.worker, trust, trusted_until, lease_ends_by)
        return CacheDoubt(self.cache_epochs, (read_in, self.cache_epochs.epoch_of(command.worker)), trust)

    def _send_whole(self, command: do.SendWhole) -> None:
        request = self._requests[command.request]
        request.begin(attempt=command.attempt, path="colocated", sent=monotonic(), decode=command.worker)
        request.watch = None
        place = self._place(command.worker)
        used = [self.cache_epochs.epoch_of(command.worker)]
        doubt = None if place.facts.vouches else CacheDoubt(self.cache_epochs, used, None)
        self._legs.start_whole(request, place, doubt)
        self.metrics.indicators.leg_runs(request.legs[Leg.WHOLE], command.worker)

    def _place(self, worker: str) -> Place:
        return Place(self.controller.cluster[worker].facts, self._origins[worker], self.cache_epochs.salt_of(worker))

    def _break_leg(self, command: do.BreakLeg) -> None:
        request = self._requests.get(command.request)
        if request is not None and request.attempt == command.attempt:
            self._legs.break_off(request)

    def _cancel_leg(self, command: do.CancelLeg) -> None:
        request = self._requests.get(command.request)
        if request is not None:
            self._legs.cancel(request, command.leg)
            if command.leg is Leg.DECODE and request.watch is not None:
                request.watch.ended(monotonic())

    def _release_handle(self, command: do.ReleaseHandle) -> None:
        request = self._requests[command.request]
        read = None
        if command.reader is not None:
            read = Read(self._origins[command.reader], PATHS[request.call.endpoint], request.call.fields)
        handle = request.handles[command.attempt]
        self._releases.start(command.request, command.attempt, self._origins[command.worker], handle, read)

    def _fail_request(self, command: do.FailRequest) -> None:
        request = self._requests.get(command.request)
        if request is None:
            return
        is_refused = command.reason in _REFUSALS and not request.is_begun
        error = _error(command.status, command.reason, command.retry_after_s)
        request.fail(error, request.answer_headers(with_route=False))
        self._end(command.request, "refused" if is_refused else "failed")

    def _relay_failure(self, command: do.RelayFailure) -> None:
        request = self._requests.get(command.request)
        if request is None:
            return
        said = request.error
        if said is None or request.is_begun:
            request.fail(_error(502, Reason.UPSTREAM_FAILED), request.answer_headers(with_route=False))
        else:
            headers = [*said.headers, *request.answer_headers(with_route=False)]
            request.responder.send(said.status, headers, said.body)
        self._end(command.request, "rejected" if said is not None and said.status < 500 else "failed")

    def _probe_worker(self, command: do.ProbeWorker) -> None:
        self.probe_now(command.worker)

    def _prove_handoff(self, command: do.ProveHandoff) -> None:
        self._canaries.start(command.canary, self._place(command.prefill), self._place(command.decode))

    def _record_role(self, command: do.RecordRole) -> None:
        self.metrics.role_changed(command.role, command.reason)
        self.role_changes.changed(monotonic(), command)

    def _record_balance(self, command: do.RecordBalance) -> None:
        """A change of role comes as one."""
        self.balances.found(monotonic(), command.balanced)

    def _record_pair(self, command: do.RecordPair) -> None:
        self.metrics.pair_changed(command.state)
        self.say(_news_of(command))

    # What engines cache

    def _judge_cache(self, event: on.Event) -> None:
        """Whether the decode engine of this request may go on using what it has cached."""
        if not isinstance(event, on.FirstTokenArrived | on.RequestFinished | on.LegFailed | on.ClientLeft):
            return
        request = self._requests.get(event.request)
        if request is None or request.watch is None:
            return
        if isinstance(event, on.ClientLeft):
            request.watch.ended(event.at)
        elif event.attempt == request.attempt:
            if not isinstance(event, on.LegFailed):
                request.watch.believed()
            elif event.failure is Failure.SUSPECT:
                request.watch.doubted()
            else:
                request.watch.ended(event.at)

    # Ends

    def _finished(self, event: on.RequestFinished) -> None:
        request = self._requests.get(event.request)
        if request is not None and request.attempt == event.attempt:
            if event.usage is not None:
                request.prompt_tokens = event.usage.prompt_tokens
            self._end(event.request, "ok", event.timeline, event.usage)

    def _end(self, name: str, outcome: str, timeline: Timeline | None = None, usage: Usage | None = None) -> None:
        request = self._requests.pop(name, None)
        if request is None:
            return
        self.decisions.ended(name)
        timeline = timeline or request.timeline(monotonic())
        tokens = request.prompt_tokens or self.controller.estimate_prompt_tokens(request.call.facts)
        self.metrics.ended(request, outcome, timeline, tokens, usage)
        if self._access_log is not None:
            self._access_log.write(request, outcome, timeline, usage)
        if not request.ended.done():
            request.ended.set_result(None)
        if not self._requests:
            self._idle.set()


def _news_of(pair: do.RecordPair) -> str:
    """For whoever watches the service."""
    way = f"handoff from {pair.prefill} to {pair.decode}"
    if pair.state is not PairState.PROVED:
        return f"{way} is set aside: {pair.why}"
    speed = "" if pair.bytes_per_s is None else f" ({pair.bytes_per_s / 1e9:.2g} GB/s)"
    if pair.is_slow:
        return f"{way} is SLOW{speed}, under handoff_floor_gb_s: it goes over TCP, most likely, where RDMA was meant"
    return f"{way} works{speed}"


async def _nobody_to_ask(worker: str) -> EngineMetrics:
    raise ProbeError("no worker is known")


def _error(status: int, reason: Reason, retry_after_s: int | None = None) -> RequestError:
    error = RequestError(_MESSAGES.get(reason, "the request failed"), reason, retry_after_s=retry_after_s)
    error.status = status
    error.kind = _KINDS.get(status, error.kind)
    return error
