"""Any order of events against the invariants: every request ends once, no reservation is lost, every handle ends once.

`World` plays everything outside the controller: clients, engines, the network and the clock. It obeys every command, keeps its
own books from what was said alone, and compares them with the controller's after each step. Some of its engines do not verify
their handles: nothing of a client may go between two of them that no canary has proved.
"""

from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.anything import anything
from tests.core.stage import prompt, worker

from twinpool.assemble import build_controller
from twinpool.config import Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.lifecycle import HandleState, PairState
from twinpool.core.model import Dialect, Failure, Leg, RequestFacts, Role, Usage, WorkerFacts
from twinpool.measure.timeline import Timeline

RULES = Routing(
    prefill_window_tokens=500,
    max_waiting=5,
    queue_timeout_s=20.0,
    worker_wait_s=8.0,
    request_timeout_s=30.0,
    max_attempts=3,
    lease_s=10.0,
    pause_s=1.0,
    max_pause_s=15.0,
    pair_strikes=2,
)

MAY_BE_THE_PAIR = (Failure.ERROR, Failure.TIMED_OUT, Failure.HANDLE_REFUSED, Failure.SUSPECT)

PICK = st.integers(0, 1000)
"""Chooses one of what is there, modulo how many there are."""


@dataclass
class Engine:
    """A worker as it truly is, and what the controller was told of it."""

    facts: WorkerFacts
    restarts: int = 1
    is_known: bool = False
    is_lost: bool = False
    is_drained: bool = False
    paused_until: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.is_known and not self.is_lost and not self.is_drained

    def is_open(self, at: float) -> bool:
        return self.is_ready and self.paused_until <= at


@dataclass
class Out:
    """A leg that was sent and has not ended."""

    worker: str
    incarnation: str
    streams: bool = False


@dataclass
class Held:
    worker: str
    incarnation: str
    expires: float
    state: HandleState = HandleState.HELD


@dataclass
class Flight:
    """A canary that was sent and has not ended. Nobody waits any longer for one whose pair is no more."""

    prefill: str
    decode: str
    is_awaited: bool = True


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.controller = build_controller(RULES)
        self.now = 1000.0
        self.engines: dict[str, Engine] = {}
        self.requests: dict[str, RequestFacts] = {}  # live ones
        self.ended: Counter[str] = Counter()
        self.attempts: dict[str, int] = {}
        self.ways: dict[tuple[str, int], Decision] = {}
        self.promised: dict[tuple[str, int], str] = {}  # room on a decode worker
        self.asked: dict[tuple[str, int], float] = {}  # when a prefill worker was asked
        self.begun: set[str] = set()  # the client has part of the answer
        self.broken: list[tuple[str, int, Leg]] = []  # legs that the driver was told to break off
        self.legs: dict[tuple[str, int, Leg], Out] = {}
        self.sent: set[tuple[str, int, Leg]] = set()
        self.handles: dict[tuple[str, int], Held] = {}  # those that have not ended
        self.fates: Counter[tuple[str, int]] = Counter()
        self.granted: set[tuple[str, int]] = set()
        self.flights: dict[int, Flight] = {}
        self.flown = 0
        self.fit: set[tuple[str, str]] = set()  # pairs that may hand over
        self.struck: dict[tuple[str, str], list[str]] = {}  # by requests in a row
        self.condemned: set[tuple[str, str]] = set()
        self.resumed: set[str] = set()

    # Obeying

    def tell(self, event: on.Event) -> None:
        commands = self.controller.handle(event)
        for command in commands:
            getattr(self, f"_{type(command).__name__}")(command)
        while self.broken:
            key = self.broken.pop()
            self.lose_leg(key, Failure.RESTARTED, can_continue=len(self.sent) % 2 == 0)
        for request, _, _ in self.legs:
            assert request in self.requests, f"a leg of {request} runs on after its end"
        assert not any(held.state is HandleState.HELD for held in self.handles.values()), "KV is parked"

    def _RecordPair(self, command: do.RecordPair) -> None:  # noqa: N802 - named after the command
        assert {command.prefill, command.decode} <= self.engines.keys()

    def _RecordDecision(self, command: do.RecordDecision) -> None:  # noqa: N802 - named after the command
        assert command.request in self.requests
        if command.decision.choice not in (Choice.WAIT, Choice.REFUSE):
            assert command.attempt == self.attempts[command.request] + 1
            self.attempts[command.request] = command.attempt
            self.ways[command.request, command.attempt] = command.decision
        if command.decision.choice is Choice.DISAGGREGATED:
            assert (command.decision.prefill, command.decision.decode) in self.fit, "nobody has shown that this pair is well"

    def _send(self, request: str, attempt: int, leg: Leg, name: str, *, may_be_closed: bool = False) -> None:
        key = (request, attempt, leg)
        engine = self.engines[name]
        assert request in self.requests
        assert attempt == self.attempts[request]
        assert key not in self.sent, f"{key} was sent before"
        assert engine.is_open(self.now) or may_be_closed, f"{key} goes to {name}, which should get nothing"
        assert engine.facts.continues or request not in self.begun, "this engine cannot go on with what another began"
        self.sent.add(key)
        self.legs[key] = Out(name, engine.facts.incarnation)

    def _SendPrefill(self, command: do.SendPrefill) -> None:  # noqa: N802
        way = self.ways[command.request, command.attempt]
        assert way.prefill == command.worker
        assert way.decode is not None
        self._send(command.request, command.attempt, Leg.PREFILL, command.worker)
        if self.engines[command.worker].facts.dialect is Dialect.NIXL:
            self.promised[command.request, command.attempt] = way.decode
            self.asked[command.request, command.attempt] = self.now

    def _SendDecode(self, command: do.SendDecode) -> None:  # noqa: N802
        key = (command.request, command.attempt)
        assert command.worker != command.prefill_worker
        if self.engines[command.prefill_worker].facts.dialect is Dialect.SGLANG:
            assert self.legs[(*key, Leg.PREFILL)].worker == command.prefill_worker
            assert command.trusted_until is None
            self._send(*key, Leg.DECODE, command.worker)
            return
        held = self.handles[key]
        assert held.state is HandleState.HELD, "a handle is sent once"
        assert held.worker == command.prefill_worker
        assert self.now < held.expires, "the lease is over"
        holder = self.engines[held.worker]
        assert not holder.is_known or holder.facts.incarnation == held.incarnation, "the handle went with its engine"
        held.state = HandleState.SENT
        engine = self.engines[command.worker]
        is_pair = holder.is_known and engine.is_known  # one that was removed ends what it has
        assert not is_pair or (held.worker, command.worker) in self.fit, "this pair is no longer proved"
        is_vouched = holder.facts.vouches and engine.facts.vouches
        lease_s = holder.facts.lease_s if holder.facts.lease_s is not None else RULES.lease_s
        assert command.trusted_until == (None if is_vouched else self.asked[key] + lease_s - RULES.lease_margin_s)
        is_promised = self.promised.pop(key) == command.worker and engine.is_known and not engine.is_lost
        self._send(*key, Leg.DECODE, command.worker, may_be_closed=is_promised)

    def _SendWhole(self, command: do.SendWhole) -> None:  # noqa: N802
        assert self.engines[command.worker].facts.serves_whole
        self._send(command.request, command.attempt, Leg.WHOLE, command.worker)

    def _CancelLeg(self, command: do.CancelLeg) -> None:  # noqa: N802
        del self.legs[command.request, command.attempt, command.leg]
        if command.leg is Leg.PREFILL:
            self.promised.pop((command.request, command.attempt), None)

    def _BreakLeg(self, command: do.BreakLeg) -> None:  # noqa: N802
        key = (command.request, command.attempt, command.leg)
        assert self.legs[key].streams
        self.broken.append(key)

    def _ReleaseHandle(self, command: do.ReleaseHandle) -> None:  # noqa: N802
        held = self.handles[command.request, command.attempt]
        assert held.state in (HandleState.HELD, HandleState.SENT)
        assert held.worker == command.worker
        if command.reader is not None:
            assert held.state is HandleState.HELD, "a handle is presented once"
            assert (held.worker, command.reader) in self.fit
            assert not self.engines[command.reader].is_lost
        held.state = HandleState.RELEASING
        self.promised.pop((command.request, command.attempt), None)

    def _FailRequest(self, command: do.FailRequest) -> None:  # noqa: N802
        self._end(command.request)

    def _RelayFailure(self, command: do.RelayFailure) -> None:  # noqa: N802
        self._end(command.request)

    def _ProbeWorker(self, command: do.ProbeWorker) -> None:  # noqa: N802
        assert self.engines[command.worker].is_lost

    def _ProveHandoff(self, command: do.ProveHandoff) -> None:  # noqa: N802
        self.flown += 1
        assert command.canary == self.flown, "each canary has its own number"
        both = {command.prefill, command.decode}
        assert len(both) == 2
        assert all(self.engines[name].is_ready for name in both)
        assert (command.prefill, command.decode) not in self.condemned
        assert not any(both & {flight.prefill, flight.decode} for flight in self.flights.values() if flight.is_awaited)
        self.flights[command.canary] = Flight(command.prefill, command.decode)

    def _RecordRole(self, command: do.RecordRole) -> None:  # noqa: N802
        assert command.role in self.engines[command.worker].facts.allowed_roles

    def _end(self, request: str) -> None:
        del self.requests[request]
        self.ended[request] += 1

    def _end_handle(self, key: tuple[str, int]) -> None:
        if self.handles.pop(key, None) is not None:
            self.fates[key] += 1

    # What happens

    @initialize(
        dialect=st.sampled_from(Dialect),
        slots=st.lists(st.integers(1, 5), min_size=5, max_size=5),
        more=st.lists(st.tuples(st.sampled_from("pddc"), st.booleans()), max_size=3),
        late=st.booleans(),
        stock=st.sampled_from(["none", "all", "all", "some"]),
        tells_life=st.booleans(),
    )
    def begin(
        self, dialect: Dialect, slots: list[int], more: list[tuple[str, bool]], late: bool, stock: str, tells_life: bool
    ) -> None:
        """A pair and up to three workers more, some of which speak the other dialect; the last may not be there yet. Stock
        engines do not verify their handles, and one of them may not tell one life of it from another."""
        other = Dialect.NIXL if dialect is Dialect.SGLANG else Dialect.SGLANG
        fleet = [("p", dialect), ("d", dialect), *((letter, other if is_odd else dialect) for letter, is_odd in more)]
        for n, (letter, spoken) in enumerate(fleet):
            name = f"{letter}{n}"
            is_stock = stock == "all" or (stock == "some" and n % 2 == 0)
            facts = worker(
                name,
                vouches=not is_stock,
                dialect=spoken,
                slots=slots[n],
                serves_whole=letter != "d" or spoken is Dialect.NIXL,
                lease_s=4.0 if n % 2 else None,
                continues=letter != "c",
                incarnation="" if is_stock and n == 0 and not tells_life else f"{name}.1",
            )
            self.engines[name] = Engine(facts)
            if not (late and n == len(fleet) - 1):
                self.join(self.engines[name])

    def join(self, engine: Engine) -> None:
        """A probe finds it well."""
        facts = engine.facts
        if not engine.is_known or (engine.is_lost and not facts.incarnation and not facts.vouches):
            self.forget_pairs(facts.worker)
        if not engine.is_known:
            engine.is_drained, engine.paused_until = False, 0.0
        engine.is_known, engine.is_lost = True, False
        for other in self.engines.values():
            if other is not engine and other.is_known and other.facts.dialect is facts.dialect:
                pairs = {(facts.worker, other.facts.worker), (other.facts.worker, facts.worker)} - set(self.struck)
                self.struck |= {pair: [] for pair in pairs}
                if facts.vouches and other.facts.vouches:
                    self.fit |= pairs
        for key, held in list(self.handles.items()):
            if held.worker == facts.worker and held.incarnation != facts.incarnation:
                self._end_handle(key)
        self.tell(on.WorkerJoined(at=self.now, facts=facts))
        assert not any(out.worker == facts.worker and out.incarnation != facts.incarnation for out in self.legs.values())

    def forget_pairs(self, name: str) -> None:
        """Another engine will answer there, or none."""
        self.fit = {pair for pair in self.fit if name not in pair}
        self.condemned = {pair for pair in self.condemned if name not in pair}
        self.struck = {pair: by for pair, by in self.struck.items() if name not in pair}
        for flight in self.flights.values():
            if name in (flight.prefill, flight.decode):
                flight.is_awaited = False

    def handoff_arrived(self, name: str, attempt: int) -> None:
        way = self.ways[name, attempt]
        if way.prefill is not None:
            pair = (way.prefill, next(out.worker for key, out in self.legs.items() if key == (name, attempt, Leg.DECODE)))
            if pair in self.struck:
                self.struck[pair] = []

    def handoff_failed(self, name: str, pair: tuple[str, str], failure: Failure) -> None:
        if pair not in self.struck:
            return
        if failure is Failure.MISCOUNTED:
            self.condemn(pair)
        elif failure in MAY_BE_THE_PAIR and pair in self.fit and name not in self.struck[pair]:
            self.struck[pair].append(name)
            if len(self.struck[pair]) >= RULES.pair_strikes:
                self.fit.remove(pair)
                self.struck[pair] = []

    def condemn(self, pair: tuple[str, str]) -> None:
        self.condemned.add(pair)
        self.fit.discard(pair)
        self.struck[pair] = []

    def engine(self, pick: int) -> Engine:
        return list(self.engines.values())[pick % len(self.engines)]

    def leg(self, pick: int) -> tuple[str, int, Leg]:
        return list(self.legs)[pick % len(self.legs)]

    @rule(
        tokens=st.sampled_from([1, 60, 200, 490, 3000]),
        obstacle=st.sampled_from([None] * 6 + [Why.N_CHOICES]),
        model=st.sampled_from(["m"] * 8 + ["unknown"]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        priority=st.sampled_from([0, 0, 0, 1, 5]),
    )
    def client_asks(self, tokens: int, obstacle: Why | None, model: str, tenant: str, priority: int) -> None:
        name = f"r{len(self.attempts)}"
        sequences = 3 if obstacle else 1
        facts = prompt(tokens, model=model, sequences=sequences, obstacle=obstacle, tenant=tenant, priority=priority)
        self.requests[name] = facts
        self.attempts[name] = 0
        self.tell(on.RequestArrived(at=self.now, request=name, facts=facts))

    @precondition(lambda self: self.requests)
    @rule(pick=PICK)
    def client_leaves(self, pick: int) -> None:
        name = list(self.requests)[pick % len(self.requests)]
        before = self.ended[name]
        facts = self.requests[name]
        self.tell(on.ClientLeft(at=self.now, request=name))
        assert (self.ended[name], self.requests[name]) == (before, facts), "who left gets no answer"
        self._end(name)
        assert not any(key[0] == name for key in self.legs)

    @precondition(lambda self: self.legs)
    @rule(pick=PICK, at_once=st.booleans(), counted=st.sampled_from([None, None, 100, 100, 101]))
    def leg_goes_on(self, pick: int, at_once: bool, counted: int | None = None) -> None:
        """A prefill answers; an answer begins, or is whole. One rule, so that a run goes through all of them."""
        key = self.leg(pick)
        if key[2] is Leg.PREFILL:
            self.prefill_answers(key)
        elif self.legs[key].streams or at_once:
            self.answer_is_whole(key, counted)
        else:
            self.first_token_comes(key)

    def prefill_answers(self, key: tuple[str, int, Leg]) -> None:
        name, attempt, _ = key
        out = self.legs.pop(key)
        facts = self.engines[out.worker].facts
        if facts.dialect is Dialect.NIXL:
            lease_s = facts.lease_s if facts.lease_s is not None else RULES.lease_s
            self.granted.add((name, attempt))
            self.handles[name, attempt] = Held(out.worker, out.incarnation, self.now + lease_s)
        self.tell(on.PrefillFinished(at=self.now, request=name, attempt=attempt, prompt_tokens=100))

    def first_token_comes(self, key: tuple[str, int, Leg]) -> None:
        name, attempt, _ = key
        self.legs[key].streams = True
        self.begun.add(name)
        self.handoff_arrived(name, attempt)
        self._end_handle((name, attempt))
        self.tell(on.FirstTokenArrived(at=self.now, request=name, attempt=attempt))

    def answer_is_whole(self, key: tuple[str, int, Leg], counted: int | None) -> None:
        """`counted` tokens of the prompt, by who decodes; who prefilled has counted 100."""
        name, attempt, _ = key
        self.handoff_arrived(name, attempt)
        way, decode = self.ways[name, attempt], self.legs.pop(key).worker
        self._end_handle((name, attempt))
        self._end(name)
        if way.prefill is not None and counted not in (None, 100) and name not in self.resumed:
            prefill = self.engines[way.prefill].facts
            is_vouched = prefill.vouches and self.engines[decode].facts.vouches
            if prefill.dialect is Dialect.NIXL and not is_vouched and (way.prefill, decode) in self.struck:
                self.condemn((way.prefill, decode))
        timeline = Timeline(arrived=self.now, ended=self.now)
        usage = None if counted is None else Usage(prompt_tokens=counted, completion_tokens=1)
        self.tell(on.RequestFinished(at=self.now, request=name, attempt=attempt, timeline=timeline, usage=usage))

    @precondition(lambda self: self.legs)
    @rule(
        pick=PICK,
        failure=st.sampled_from(Failure),
        status=st.sampled_from([None, 500]),
        wait=st.sampled_from([None, 0.0, 3.0, 99.0]),
        can_continue=st.booleans(),
    )
    def leg_fails(self, pick: int, failure: Failure, status: int | None, wait: float | None, can_continue: bool) -> None:
        key = self.leg(pick)
        of_decode = dict.fromkeys((Failure.HANDLE_REFUSED, Failure.SUSPECT, Failure.MISCOUNTED), Leg.DECODE)
        if {Failure.NO_HANDLE: Leg.PREFILL, **of_decode}.get(failure, key[2]) is not key[2]:
            failure = Failure.ERROR
        self.lose_leg(key, failure, status, wait, can_continue=can_continue)

    def lose_leg(
        self,
        key: tuple[str, int, Leg],
        failure: Failure,
        status: int | None = None,
        wait: float | None = None,
        *,
        can_continue: bool,
    ) -> None:
        name, attempt, leg = key
        was_streaming = any(out.streams for other, out in self.legs.items() if other[0] == name)
        out = self.legs.pop(key)
        engine = self.engines[out.worker]
        can_continue = can_continue and out.streams
        if leg is Leg.PREFILL:
            self.promised.pop((name, attempt), None)
        if engine.is_known and engine.facts.incarnation == out.incarnation:
            if failure is Failure.BUSY:
                pause_s = min(max(RULES.pause_s, wait or 0.0), RULES.max_pause_s)
                engine.paused_until = max(engine.paused_until, self.now + pause_s)
            if failure in (Failure.UNREACHABLE, Failure.BROKEN):
                engine.is_lost = True
            prefill = self.ways[name, attempt].prefill
            if leg is Leg.DECODE and prefill is not None and not out.streams:
                self.handoff_failed(name, (prefill, out.worker), failure)
        event = on.LegFailed(
            at=self.now,
            request=name,
            attempt=attempt,
            leg=leg,
            failure=failure,
            status=status,
            retry_after_s=wait,
            can_continue=can_continue,
        )
        if out.streams and can_continue:
            self.resumed.add(name)
        self.tell(event)
        if was_streaming and not can_continue:
            assert self.attempts[name] == attempt, "a stream is not begun anew"
            assert (name in self.requests) == (leg is Leg.PREFILL)
        elif failure is Failure.REJECTED and not was_streaming:
            assert name not in self.requests

    @precondition(lambda self: any(held.state is HandleState.RELEASING for held in self.handles.values()))
    @rule(pick=PICK, freed=st.booleans())
    def release_is_answered(self, pick: int, freed: bool) -> None:
        keys = [key for key, held in self.handles.items() if held.state is HandleState.RELEASING]
        key = keys[pick % len(keys)]
        if freed:
            self._end_handle(key)
        else:
            self.handles[key].state = HandleState.ORPHANED
        self.tell(on.HandleReleased(at=self.now, request=key[0], attempt=key[1], freed=freed))

    @precondition(lambda self: self.flights)
    @rule(
        pick=PICK,
        how=st.sampled_from(["arrived"] * 3 + ["failed", "not tried"]),
        took_s=st.sampled_from([0.0, 0.01, 0.1]),
    )
    def canary_ends(self, pick: int, how: str, took_s: float) -> None:
        """In any order, and some never."""
        number = list(self.flights)[pick % len(self.flights)]
        flight = self.flights.pop(number)
        pair = (flight.prefill, flight.decode)
        if flight.is_awaited and pair not in self.condemned:
            if how == "arrived":
                self.fit.add(pair)
            elif how == "failed":
                self.fit.discard(pair)
            if how != "not tried":
                self.struck[pair] = []
        if how == "arrived":
            self.tell(on.HandoffProved(at=self.now, canary=number, took_s=took_s))
        else:
            was_tried = how == "failed"
            self.tell(on.HandoffNotProved(at=self.now, canary=number, took_s=took_s, why="a reason", was_tried=was_tried))

    @rule(
        pick=PICK,
        what=st.sampled_from(["probed"] * 5 + ["restarted"] * 3 + ["lost"] * 2 + ["removed", "drained", "asked"]),
        role=st.sampled_from([None, None, None, *Role]),
    )
    def something_befalls_an_engine(self, pick: int, what: str, role: Role | None) -> None:
        """One rule, so that most steps are about requests."""
        engine = self.engine(pick)
        name = engine.facts.worker
        match what:
            case "probed":
                self.join(engine)
            case "restarted":
                self.restart(engine)
            case "lost":
                engine.is_lost = engine.is_known
                self.tell(on.WorkerLost(at=self.now, worker=name, reason="no answer", is_gone=pick % 2 == 0))
            case "removed":
                engine.is_known = engine.is_lost = False
                self.forget_pairs(name)
                self.tell(on.WorkerRemoved(at=self.now, worker=name))
            case "drained":
                engine.is_drained = engine.is_known
                self.tell(on.DrainAsked(at=self.now, worker=name))
            case "asked":
                self.tell(on.RoleAsked(at=self.now, worker=name, role=role or engine.facts.role))

    def restart(self, engine: Engine) -> None:
        engine.restarts += 1
        if engine.facts.incarnation:
            engine.facts = msgspec.structs.replace(engine.facts, incarnation=f"{engine.facts.worker}.{engine.restarts}")
            engine.is_drained, engine.paused_until = False, 0.0
            self.forget_pairs(engine.facts.worker)
        self.join(engine)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0, 12.0]), timer_is_late=st.booleans())
    def time_passes(self, seconds: float, timer_is_late: bool) -> None:
        self.now += seconds
        due = self.controller.next_wakeup()
        if due is not None and due <= self.now and not timer_is_late:
            self.wake()

    def wake(self) -> None:
        for key, held in list(self.handles.items()):
            if held.state is HandleState.ORPHANED and held.expires <= self.now:
                self._end_handle(key)
        self.tell(on.TimePassed(at=self.now))
        due = self.controller.next_wakeup()
        assert due is None or due > self.now, "the timer would fire for ever"

    # What always holds

    @invariant()
    def the_books_balance(self) -> None:
        self.controller.validate()

    @invariant()
    def the_books_are_ours(self) -> None:
        assert self.controller.live_requests == len(self.requests)
        assert set(self.ended.values()) <= {1}
        assert self.controller.handles_by_state() == Counter(held.state for held in self.handles.values())
        weights: Counter[str] = Counter()
        for (name, _, leg), out in self.legs.items():
            weights[out.worker] += self.requests[name].sequences if leg is Leg.WHOLE else 1
        for place in self.promised.values():
            weights[place] += 1
        for seen in self.controller.cluster:
            assert seen.sequences == weights[seen.facts.worker]
            assert min(seen.prefill_tokens, seen.kv_tokens, seen.sequences) >= 0

    @invariant()
    def the_pairs_are_ours(self) -> None:
        pairs = list(self.controller.pairs())
        assert {(pair.prefill, pair.decode) for pair in pairs} == set(self.struck)
        assert {(pair.prefill, pair.decode) for pair in pairs if pair.state is PairState.PROVED} == self.fit
        assert {(pair.prefill, pair.decode): pair.strikes for pair in pairs} == {p: len(by) for p, by in self.struck.items()}
        awaited = {number for number, flight in self.flights.items() if flight.is_awaited}
        assert {pair.canary for pair in pairs if pair.canary} == awaited, "each canary ends once"

    @invariant()
    def whoever_waits_has_a_timer(self) -> None:
        begun = {key[0] for key in self.legs}
        waiting = [name for name in self.requests if name not in begun]
        assert self.controller.waiting_requests() == len(waiting)
        if waiting:
            assert self.controller.next_wakeup() is not None

    @invariant()
    def nobody_who_could_go_was_forgotten(self) -> None:
        due = self.controller.next_wakeup()
        if due is None or due > self.now:
            before = len(self.sent), self.flown
            self.wake()
            assert (len(self.sent), self.flown) == before, "an event freed the way, and nobody was sent"

    def teardown(self) -> None:
        """Everything gets well again, and then everything must come to its end."""
        for engine in self.engines.values():
            self.restart(engine)
        for _ in range(1000):
            if any(held.state is HandleState.RELEASING for held in self.handles.values()):
                self.release_is_answered(0, True)
            elif self.flights:
                self.canary_ends(0, "arrived", 0.1)
            elif self.legs:
                self.leg_goes_on(0, True)
            elif (self.requests or self.handles) and (due := self.controller.next_wakeup()) is not None:
                self.now = max(self.now, due)
                self.wake()
            else:
                break
        assert self.requests == {}
        assert self.controller.live_requests == self.controller.waiting_requests() == 0
        assert self.ended == dict.fromkeys(self.attempts, 1)
        assert self.handles == {}
        assert self.fates == dict.fromkeys(self.granted, 1), "each handle ends once"
        assert self.promised == {}
        assert self.flights == {}
        self.the_books_balance()
        self.the_books_are_ours()
        super().teardown()


World.TestCase.settings = settings(
    max_examples=400, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.timeout(400)  # takes seconds; only a failure needs minutes, to find its shortest story
class TestWorld(World.TestCase):
    pass


NAMES = {
    "request": st.sampled_from(["r0", "r1", "r2"]),
    "worker": st.sampled_from(["p1", "d1", "x"]),
    "incarnation": st.sampled_from(["1", "2"]),
    "model": st.just("m"),
    "models": st.sampled_from([("m",), ()]),
    "attempt": st.integers(-1, 3),
    "at": st.floats(0, 100),
    "canary": st.integers(0, 6),
    "took_s": st.floats(0, 10),
    "slots": st.none() | st.integers(-1, 2),
    "prompt_chars": st.integers(0, 10_000),
    "prompt_tokens": st.integers(-1, 10_000),
    "sequences": st.integers(1, 3),
}


@settings(max_examples=300, deadline=None)
@given(st.lists(anything(on.Event, NAMES), max_size=40))
def test_nonsense_never_raises_and_never_unbalances_the_books(events: list[on.Event]) -> None:
    """Stale, doubled, backwards in time, about workers and requests that never were."""
    controller = build_controller(RULES)
    for facts in (worker("p1"), worker("d1")):
        controller.handle(on.WorkerJoined(at=0.0, facts=facts))
    live: set[str] = set()
    for event in events:
        commands = controller.handle(event)
        controller.validate()
        if isinstance(event, on.RequestArrived):
            live.add(event.request)
        for command in commands:
            if isinstance(command, do.FailRequest | do.RelayFailure):
                live.remove(command.request)
            if isinstance(command, do.SendPrefill | do.SendDecode | do.SendWhole):
                assert command.request in live
        for name in list(live):
            if not controller.is_live(name):
                assert isinstance(event, on.ClientLeft | on.RequestFinished)
                live.remove(name)
        assert controller.live_requests == len(live)
        assert not controller.waiting_requests() or controller.next_wakeup() is not None
