"""The gateway's part in virtual time: feeds the controller what happens, and does what it commands.

It is to `sim` what `gateway/driver` is to the live service: the same events go in, every command is carried out, and the
controller cannot tell the two apart. Only one dialect is played, the legs one after the other (nixl). All that a policy may
know comes through events; nothing here tells it how an engine stands."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.controller import Controller
from twinpool.core.decisions import Balanced
from twinpool.core.model import Failure, Leg, RequestFacts, Role, Usage
from twinpool.errors import Reason
from twinpool.measure.timeline import Timeline
from twinpool.sim.client import Client, Ended, Placed
from twinpool.sim.fleet import MODEL, SimulatedWorker
from twinpool.sim.link import handed_over_at
from twinpool.sim.loop import Loop, Rank
from twinpool.sim.scenario import Clients, Gateway
from twinpool.sim.sequence import Place, Sequence
from twinpool.workload.offered import Offered

_CANARY_S = 0.1
_REFUSALS = frozenset({Reason.QUEUE_FULL, Reason.WOULD_BE_LATE, Reason.NO_WORKER, Reason.DRAINING})


# members under names of this module: through its class each takes 0.2 µs on Python 3.11, several dozen times a request
_PREFILL, _DECODE, _WHOLE = Leg
_COMING, _HELD, _GONE = Place.COMING, Place.HELD, Place.GONE
_CLIENT, _HANDOFF = Rank.CLIENT, Rank.HANDOFF


class Driver:
    """`on_end` is given every request as it ends; `on_step`, where there is one, every event with its commands (a journal)."""

    def __init__(
        self,
        loop: Loop,
        controller: Controller,
        clients: Clients,
        gateway: Gateway,
        on_end: Callable[[Ended], None],
        on_step: Callable[[on.Event, list[do.Command]], None] | None = None,
    ) -> None:
        self.workers: dict[str, SimulatedWorker] = {}
        self.decisions: Counter[tuple[str, str]] = Counter()
        self.role_changes: list[tuple[float, str, Role, str]] = []
        self.balanced: list[tuple[float, Balanced]] = []
        self.lost_leases = 0
        self._loop = loop
        self._controller = controller
        self._clients = clients
        self._gateway = gateway
        self._on_end = on_end
        self._on_step = on_step
        self._requests: dict[str, Client] = {}
        self._handles: dict[tuple[str, int], Placed] = {}
        self._offered: Iterator[Offered] = iter(())
        self._expects = False
        self._arrived = 0
        self._events: deque[on.Event] = deque()
        self._is_feeding = False
        self._alarm_at: float | None = None
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
            do.RecordBalance: self._record_balance,
        }

    def is_going(self) -> bool:
        """A request lives, or one is to come."""
        return bool(self._requests) or self._expects

    def _stop_if_over(self) -> None:
        if not self._requests and not self._expects:
            self._loop.stop()

    def start(self, workers: dict[str, SimulatedWorker], offered: Iterator[Offered]) -> None:
        """All workers are well at time zero, and the first client is on its way."""
        self.workers = workers
        for worker in workers.values():
            self.feed(on.WorkerJoined(at=self._loop.at, facts=worker.facts))
        self._offered = offered
        self._expect_next()
        if self._gateway.load_reports_s is not None:
            self._loop.call_at(self._gateway.load_reports_s, Rank.PROBE, self._read_loads, self._gateway.load_reports_s)

    def feed(self, event: on.Event) -> None:
        """Take in one event and carry out what follows from it. What that brings about at once waits its turn."""
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        events, handle, executors = self._events, self._controller.handle, self._executors
        while events:
            event = events.popleft()
            commands = handle(event)
            if self._on_step is not None:
                self._on_step(event, commands)
            for command in commands:
                executors[type(command)](command)
            if type(event) is on.RequestFinished:
                self._request_finished(event)
        self._is_feeding = False
        alarm_at = self._controller.next_wakeup()
        if alarm_at != self._alarm_at:
            self._alarm_at = alarm_at
            if alarm_at is not None:
                self._loop.call_at(alarm_at, Rank.TIMER, self._wake, alarm_at)

    # Clients

    def _expect_next(self) -> None:
        offered = next(self._offered, None)
        if offered is not None:
            self._expects = True
            self._loop.call_at(offered.at_s, _CLIENT, self._arrive, offered)
        else:
            self._expects = False
            self._stop_if_over()

    def _arrive(self, at: float, offered: Offered) -> None:
        self._arrived += 1
        client = Client(f"r{self._arrived}", offered, at)
        self._requests[client.id] = client
        facts = RequestFacts(
            model=MODEL,
            endpoint="chat",
            stream=True,
            prompt_chars=round(offered.prompt_tokens * self._clients.chars_per_token),
            prefix=offered.prefix,
            tenant=offered.tenant,
            priority=offered.priority,
        )
        self.feed(on.RequestArrived(at=at, request=client.id, facts=facts))
        if self._clients.patience_s is not None:
            self._loop.call_at(at + self._clients.patience_s, _CLIENT, self._lose_patience, client.id)
        self._expect_next()

    def _lose_patience(self, at: float, request: str) -> None:
        client = self._requests.get(request)
        if client is not None and client.first_token is None:
            self.feed(on.ClientLeft(at=at, request=request))
            self._end(client, "left")

    def _wake(self, at: float, asked_at: float) -> None:
        if asked_at == self._alarm_at:
            self._alarm_at = None
            self.feed(on.TimePassed(at=at))

    # What engines tell

    def prompt_read(self, at: float, sequence: Sequence) -> None:
        client: Client = sequence.request
        placed = client.prefill
        if placed is None or placed.sequence is not sequence:  # cancelled while its step was under way
            return
        sequence.expires = at + self._gateway.lease_s
        client.prefilled = at
        client.handle = self._handles[client.id, client.attempt] = placed
        self.feed(
            on.PrefillFinished(
                at=at,
                request=client.id,
                attempt=client.attempt,
                prompt_tokens=client.offered.prompt_tokens,  # what was sent already is no part of what the client asked
                cached_tokens=min(sequence.cached_tokens, client.offered.prompt_tokens),
            )
        )

    def has_room(self, at: float, sequence: Sequence) -> None:
        """D has room and pulls: the KV it does not hold itself."""
        client: Client = sequence.request
        source, target = client.handle, client.decode
        if source is None or target is None or not self._is_fetchable(at, source):
            self._refuse_handle(at, client)
            return
        size = (sequence.prompt_tokens - sequence.cached_tokens) * target.worker.kind.profile.kv_bytes_per_token
        group, profile = target.worker.kind.group, target.worker.kind.profile
        latency_s = profile.handoff_latency_ms / 1e3 if group.handoff_latency_s is None else group.handoff_latency_s
        ends = handed_over_at(at, size, source.worker.ports, target.worker.ports, latency_s)
        self._loop.call_at(ends, _HANDOFF, self._handed_over, sequence)

    def _handed_over(self, at: float, sequence: Sequence) -> None:
        client: Client = sequence.request
        source, target = client.handle, client.decode
        if target is None or target.sequence is not sequence or sequence.place is not _COMING:
            return
        if source is None or not self._is_fetchable(at, source):
            self._refuse_handle(at, client)
            return
        self._handles.pop((client.id, client.attempt), None)
        source.worker.engine.free(at, source.sequence)
        client.handoff_s = at - client.decode_began
        target.worker.engine.join(at, sequence)

    @staticmethod
    def _is_fetchable(at: float, source: Placed) -> bool:
        return source.is_alive and source.sequence.place is _HELD and at <= source.sequence.expires

    def _refuse_handle(self, at: float, client: Client) -> None:
        """The lease ended first, or P died: a stock engine would answer with garbage, and the gateway would throw it away."""
        self.lost_leases += 1
        target = client.decode
        if target is not None:
            target.worker.engine.cancel(at, target.sequence)
        self._fail_leg(client, client.attempt, _DECODE, Failure.HANDLE_REFUSED)

    def first_token(self, at: float, sequence: Sequence) -> None:
        client: Client = sequence.request
        if client.decode is None or client.decode.sequence is not sequence:
            return
        if client.first_token is None:
            client.first_token = at
        self.feed(on.FirstTokenArrived(at=at, request=client.id, attempt=client.attempt))

    def finished(self, at: float, sequence: Sequence) -> None:
        client: Client = sequence.request
        if client.decode is None or client.decode.sequence is not sequence:
            return
        offered = client.offered
        usage = Usage(offered.prompt_tokens, offered.output_tokens, sequence.cached_tokens)
        self.feed(
            on.RequestFinished(at=at, request=client.id, attempt=client.attempt, timeline=client.timeline(at), usage=usage)
        )

    # Commands

    def _record_decision(self, command: do.RecordDecision) -> None:
        decision = command.decision
        self.decisions[decision.choice, decision.why] += 1

    def _send_prefill(self, command: do.SendPrefill) -> None:
        client = self._requests[command.request]
        client.begin(command.attempt, "disaggregated", self._loop.at)
        worker = self.workers[command.worker]
        sequence = Sequence(client, _PREFILL, client.offered, written=client.written)
        placed = client.prefill = Placed(worker, worker.incarnation, sequence)
        self._send(client, placed)

    def _send_decode(self, command: do.SendDecode) -> None:
        client = self._requests[command.request]
        worker = self.workers[command.worker]
        placed = client.decode = Placed(worker, worker.incarnation, client.answer(_DECODE))
        self._send(client, placed)

    def _send_whole(self, command: do.SendWhole) -> None:
        client = self._requests[command.request]
        client.begin(command.attempt, "colocated", self._loop.at)
        worker = self.workers[command.worker]
        placed = client.decode = Placed(worker, worker.incarnation, client.answer(_WHOLE))
        self._send(client, placed)

    def _send(self, client: Client, placed: Placed) -> None:
        what = (client, client.attempt, placed)
        if self._gateway.dispatch_s > 0:
            self._loop.call_at(self._loop.at + self._gateway.dispatch_s, _HANDOFF, self._deliver, what)
        else:
            self._deliver(self._loop.at, what)

    def _deliver(self, at: float, what: tuple[Client, int, Placed]) -> None:
        client, attempt, placed = what
        worker, sequence = placed.worker, placed.sequence
        if sequence.place is _GONE:
            return
        if not placed.is_alive:
            self._fail_leg(client, attempt, sequence.leg, Failure.UNREACHABLE)
        elif client.offered.prompt_tokens + client.offered.output_tokens > worker.engine.longest_tokens:
            self._fail_leg(client, attempt, sequence.leg, Failure.REJECTED)
        elif sequence.leg is _DECODE:
            client.decode_began = at
            worker.engine.receive(at, sequence)
        else:
            worker.engine.submit(at, sequence)

    def _cancel_leg(self, command: do.CancelLeg) -> None:
        client = self._requests.get(command.request)
        if client is None or client.attempt != command.attempt:
            return
        placed = client.prefill if command.leg is _PREFILL else client.decode
        if placed is not None:
            placed.worker.engine.cancel(self._loop.at, placed.sequence)

    def _break_leg(self, command: do.BreakLeg) -> None:
        """Its engine is gone, and took the sequence along; what it had sent is counted already."""
        client = self._requests.get(command.request)
        if client is not None and client.attempt == command.attempt:
            self._fail_leg(client, command.attempt, command.leg, Failure.RESTARTED)

    def _release_handle(self, command: do.ReleaseHandle) -> None:
        at = self._loop.at
        held = self._handles.pop((command.request, command.attempt), None)
        is_freed = held is not None and held.is_alive
        if held is not None and is_freed:
            held.worker.engine.free(at, held.sequence)
        self.feed(on.HandleReleased(at=at, request=command.request, attempt=command.attempt, freed=is_freed))

    def _fail_request(self, command: do.FailRequest) -> None:
        client = self._requests.get(command.request)
        if client is not None:
            is_refused = command.reason in _REFUSALS and client.first_token is None
            self._end(client, "refused" if is_refused else "failed")

    def _relay_failure(self, command: do.RelayFailure) -> None:
        client = self._requests.get(command.request)
        if client is not None:
            self._end(client, "rejected")

    def _probe_worker(self, command: do.ProbeWorker) -> None:
        self._loop.call_at(self._loop.at, Rank.PROBE, self.probe, command.worker)

    def probe(self, at: float, name: str) -> None:
        """Look whether it is well; one that is not is looked at again."""
        worker = self.workers[name]
        if worker.is_up:
            self.feed(on.WorkerJoined(at=at, facts=worker.facts))
        else:
            self.feed(on.WorkerLost(at=at, worker=name, reason="no answer"))
            self._loop.call_at(at + self._gateway.probe_interval_s, Rank.PROBE, self.probe, name)

    def _read_loads(self, at: float, every_s: float) -> None:
        """What the engines that are up say of themselves now comes to be known `load_age_s` later."""
        age_s = self._gateway.load_age_s
        for name, worker in self.workers.items():
            if worker.is_up:
                engine = worker.engine
                report = on.LoadReported(
                    at=at + age_s,
                    worker=name,
                    age_s=age_s,
                    running=engine.running,
                    waiting=engine.waiting,
                    kv_used_ratio=engine.kv_used_ratio(at),
                )
                self._loop.call_at(at + age_s, Rank.PROBE, self._tell_load, report)
        if self.is_going():
            self._loop.call_at(at + every_s, Rank.PROBE, self._read_loads, every_s)

    def _tell_load(self, at: float, report: on.LoadReported) -> None:
        self.feed(report)

    def _prove_handoff(self, command: do.ProveHandoff) -> None:
        """A pair that was set aside: its canary arrives, after what a small handoff takes."""
        self._loop.call_at(self._loop.at + _CANARY_S, Rank.PROBE, self._proved, command.canary)

    def _proved(self, at: float, canary: int) -> None:
        self.feed(on.HandoffProved(at=at, canary=canary, took_s=_CANARY_S))

    def _record_balance(self, command: do.RecordBalance) -> None:
        self.balanced.append((self._loop.at, command.balanced))

    def _record_role(self, command: do.RecordRole) -> None:
        worker = self.workers[command.worker]
        worker.engine.budget_tokens = worker.kind.budget_for(command.role)
        self.role_changes.append((self._loop.at, command.worker, command.role, command.reason))

    # Ends

    def broke(self, at: float, sequence: Sequence) -> None:
        """The engine died with this sequence."""
        client: Client = sequence.request
        for placed, leg in ((client.prefill, _PREFILL), (client.decode, sequence.leg)):
            if placed is None or placed.sequence is not sequence:
                continue
            if leg is _PREFILL and client.handle is placed:  # read already: whoever fetches it will find it gone
                return
            can_continue = self._gateway.continues and client.first_token is not None
            if can_continue:
                client.written += sequence.written
            self._fail_leg(client, client.attempt, leg, Failure.BROKEN, can_continue=can_continue)
            return

    def _fail_leg(self, client: Client, attempt: int, leg: Leg, failure: Failure, *, can_continue: bool = False) -> None:
        self.feed(
            on.LegFailed(
                at=self._loop.at, request=client.id, attempt=attempt, leg=leg, failure=failure, can_continue=can_continue
            )
        )

    def _request_finished(self, event: on.RequestFinished) -> None:
        client = self._requests.get(event.request)
        if client is not None and client.attempt == event.attempt:
            self._end(client, "ok", event.timeline)

    def _end(self, client: Client, outcome: str, timeline: Timeline | None = None) -> None:
        del self._requests[client.id]
        timeline = timeline or client.timeline(self._loop.at)
        if outcome != "ok" or client.decode is None:
            self._on_end(Ended(client.offered, outcome, client.path, timeline))
        else:
            sequence = client.decode.sequence
            read_by = client.prefill.sequence if client.prefill is not None else sequence
            self._on_end(Ended(client.offered, outcome, client.path, timeline, sequence.gaps, read_by.cached_tokens))
        client.forget_legs()
        self._stop_if_over()
