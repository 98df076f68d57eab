"""The controller: every event goes in here, every command comes out, and nothing else decides.

Synchronous, one writer, no locks, no clock but `event.at`. The gateway's driver and the simulator feed the same object. The
promise is: same events, same commands. So it never iterates a set of ids, and ties end with the id.
"""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from twinpool.config import Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.cluster import Cluster, LegKey, Worker
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.handles import Handles
from twinpool.core.lifecycle import ENDS, HandleState, PairState, RequestMove, RequestState, WorkerState
from twinpool.core.model import Dialect, Failure, Incarnation, Leg, RequestFacts, WorkerFacts
from twinpool.core.pairs import Pair, Pairs
from twinpool.core.policies import Entrance, Policies
from twinpool.core.requests import Request
from twinpool.core.snapshot import Snapshot, encode_snapshot
from twinpool.core.waiting import Waiting
from twinpool.errors import Reason

_REFUSALS: dict[Why, tuple[int, Reason, int | None]] = {
    Why.QUEUE_FULL: (429, Reason.QUEUE_FULL, 1),
    Why.DRAINING: (503, Reason.DRAINING, 5),
    Why.QUEUE_TIMEOUT: (503, Reason.QUEUE_FULL, 5),
    Why.NO_WORKER: (503, Reason.NO_WORKER, 5),
}
"""What the client gets for each refusal: status, reason, Retry-After in seconds."""

_STRIKES = frozenset(set(Failure) - {Failure.REJECTED, Failure.BUSY, Failure.UNREACHABLE})
"""Failures that count against `max_attempts`. A busy or an absent worker does not: those are bounded by the deadlines."""

_MAY_BE_THE_PAIR = frozenset({Failure.ERROR, Failure.TIMED_OUT, Failure.HANDLE_REFUSED, Failure.SUSPECT, Failure.MISCOUNTED})
"""Failures of a decode leg for which the prefill worker may be as much at fault: a retry avoids both, and they count against
the pair."""

_FAILED_HANDOFFS = frozenset({Failure.NO_HANDLE, Failure.HANDLE_REFUSED, Failure.SUSPECT, Failure.MISCOUNTED})

_CONNECTION_LOST = frozenset({Failure.UNREACHABLE, Failure.BROKEN})


_UNANSWERED = frozenset({RequestState.PREFILLING, RequestState.DECODING, RequestState.PAIRED, RequestState.SERVING})
"""Legs are out, and the client has nothing yet: its deadline still runs."""


class Controller:
    """`handle` one event after the other; ask `next_wakeup` when to send the next `TimePassed`."""

    def __init__(self, policies: Policies, rules: Routing, snapshot: Snapshot | None = None) -> None:
        """With a snapshot it goes on where another controller stood; the snapshot's records are its own from now on."""
        self.cluster = Cluster()
        self.is_draining = False
        self._policies = policies
        self.rules = rules
        self._requests: dict[str, Request] = {}
        self._waiting = Waiting()
        self._handles = Handles()
        self._pairs = Pairs(self.cluster, rules)
        self._wakeup: float | None = None  # the earliest time at which something may be due
        if snapshot is not None:
            self._recall(snapshot)
        self._handlers: dict[type, Callable[[Any, list[do.Command]], None]] = {
            on.RequestArrived: self._request_arrived,
            on.PrefillFinished: self._prefill_finished,
            on.FirstTokenArrived: self._first_token_arrived,
            on.RequestFinished: self._request_finished,
            on.LegFailed: self._leg_failed,
            on.ClientLeft: self._client_left,
            on.HandleReleased: self._handle_released,
            on.HandoffProved: self._handoff_proved,
            on.HandoffNotProved: self._handoff_not_proved,
            on.WorkerJoined: self._worker_joined,
            on.WorkerLost: self._worker_lost,
            on.WorkerRemoved: self._worker_removed,
            on.DrainAsked: self._drain_asked,
            on.RoleAsked: self._role_asked,
            on.GatewayDrained: self._gateway_drained,
            on.TimePassed: self._time_passed,
        }

    def handle(self, event: on.Event) -> list[do.Command]:
        """Take in one event and say what must be done now. Stale news (of an ended request, of an attempt that was given
        up, of a worker that is gone) changes nothing."""
        out: list[do.Command] = []
        self._handlers[type(event)](event, out)
        return out

    def next_wakeup(self) -> float | None:
        """The time of the next `TimePassed` this controller wants, on the clock of `event.at`."""
        return self._wakeup

    # Snapshots

    def remember(self) -> msgspec.Raw:
        """All it knows, as JSON: a controller built with this goes on exactly as this one will."""
        return encode_snapshot(
            Snapshot(
                is_draining=self.is_draining,
                wakeup=self._wakeup,
                cluster=self.cluster.remember(),
                requests=list(self._requests.values()),
                waiting=self._waiting.remember(),
                handles=self._handles.remember(),
                pairs=self._pairs.remember(),
                prompt_lengths=self._policies.prompt_lengths.remember(),
            )
        )

    def _recall(self, snapshot: Snapshot) -> None:
        self.is_draining = snapshot.is_draining
        self._wakeup = snapshot.wakeup
        self.cluster = Cluster(snapshot.cluster)
        self._requests = {request.id: request for request in snapshot.requests}
        self._waiting = Waiting(snapshot.waiting, self._requests)
        self._handles = Handles(snapshot.handles)
        self._pairs = Pairs(self.cluster, self.rules, snapshot.pairs)
        self._policies.prompt_lengths.recall(snapshot.prompt_lengths)

    # What others may look at

    @property
    def live_requests(self) -> int:
        return len(self._requests)

    def waiting_requests(self) -> int:
        return len(self._waiting)

    def estimate_prompt_tokens(self, facts: RequestFacts) -> int:
        return self._policies.prompt_lengths.tokens(facts)

    def handles_by_state(self) -> dict[HandleState, int]:
        """Handles that have not ended, by state."""
        return self._handles.by_state()

    def holds_handles(self, worker: str) -> bool:
        """Whether it keeps KV for us."""
        return self._handles.any_on(worker)

    def pairs(self) -> Iterable[Pair]:
        """Every two workers that could hand over, in that direction."""
        return self._pairs

    # Requests

    def _request_arrived(self, event: on.RequestArrived, out: list[do.Command]) -> None:
        if event.request in self._requests:
            return
        tokens = self._policies.prompt_lengths.tokens(event.facts)
        request = Request.arrived(event.request, event.facts, tokens, event.at + self.rules.request_timeout_s)
        self._requests[event.request] = request
        refusal = self._policies.admit(event.facts, Entrance(len(self._waiting), self.is_draining))
        if refusal is not None:
            self._refuse(request, refusal, out)
            return
        self._alarm(request.expires)
        request.story.move(RequestMove.QUEUE)
        self._set_deadline(request, event.at)
        self._waiting.append(request)
        self._dispatch(event.at, out)

    def _set_deadline(self, request: Request, at: float) -> None:
        """How long it may wait, from now: for its turn, or where there is no worker at all, for one to come."""
        patience_s = self.rules.queue_timeout_s if self.cluster.has_ready(request.facts.model) else self.rules.worker_wait_s
        request.waits_since = at
        request.deadline = min(at + patience_s, request.expires)
        self._alarm(request.deadline)

    def _dispatch(self, at: float, out: list[do.Command]) -> None:
        """Send on its way whoever can go."""
        for lane in self._waiting.lanes():
            while (request := self._waiting.head(lane)) is not None:
                decision = self._policies.route(request.pending(), self.cluster.routable(lane.model, at))
                if decision.choice is Choice.WAIT:
                    if not request.shown_waiting:
                        request.shown_waiting = True
                        out.append(do.RecordDecision(request=request.id, attempt=request.attempt, decision=decision))
                    break
                self._waiting.remove(request)
                self._start(request, decision, out)

    def _start(self, request: Request, decision: Decision, out: list[do.Command]) -> None:
        request.attempt += 1
        request.shown_waiting = False
        tokens, sequences = request.prompt_tokens, request.facts.sequences
        out.append(do.RecordDecision(request=request.id, attempt=request.attempt, decision=decision))
        if decision.decode is None:
            raise ValueError(f"{decision} names no worker to decode on")
        decode = self.cluster[decision.decode]
        request.decode = decode.engine
        if decision.prefill is None:
            request.prefill = request.dialect = None
            request.story.move(RequestMove.SERVE)
            self.cluster.take(
                self._key(request, Leg.WHOLE),
                decode,
                prefill_tokens=tokens,
                kv_tokens=tokens * sequences,
                sequences=sequences,
            )
            self._send(request, Leg.WHOLE, out)
            return
        prefill = self.cluster[decision.prefill]
        request.prefill = prefill.engine
        request.dialect = prefill.facts.dialect
        self.cluster.take(self._key(request, Leg.PREFILL), prefill, prefill_tokens=tokens)
        self.cluster.take(self._key(request, Leg.DECODE), decode, kv_tokens=tokens)
        if request.dialect is Dialect.SGLANG:
            request.story.move(RequestMove.PAIR)
            self._send(request, Leg.PREFILL, out)
            self._send(request, Leg.DECODE, out)
        else:
            request.story.move(RequestMove.PREFILL)
            self._send(request, Leg.PREFILL, out)

    def _prefill_finished(self, event: on.PrefillFinished, out: list[do.Command]) -> None:
        request = self._current(event.request, event.attempt)
        if request is None or Leg.PREFILL not in request.out:
            return
        request.out.remove(Leg.PREFILL)
        self.cluster.give_back(self._key(request, Leg.PREFILL))
        self._learn_length(request, event.prompt_tokens)
        if request.story.state is RequestState.PREFILLING:
            self._hand_off(request, event, out)
        self._dispatch(event.at, out)

    def _hand_off(self, request: Request, event: on.PrefillFinished, out: list[do.Command]) -> None:
        """The prompt is read and P holds it: give the handle to D at once, or to another D where that one should get nothing
        now. A D that drains or is busy honours its reservation where there is no other; where it is gone, the prefill was in
        vain."""
        prefill, decode = _both(request)
        request.counted_tokens = event.prompt_tokens
        lease_s = prefill.lease_s if prefill.lease_s is not None else self.rules.lease_s
        self._handles.hold((request.id, request.attempt), prefill, event.at + lease_s)
        reserved = self.cluster.get(decode.worker)
        pair = self._pairs.get(prefill.worker, decode.worker)
        is_doubted = pair is not None and pair.state is not PairState.PROVED
        if reserved is None or not reserved.is_open(event.at) or is_doubted:
            other = self._other_decode(request, prefill.worker, event.at)
            if other is not None:
                key = self._key(request, Leg.DECODE)
                self.cluster.give_back(key)
                self.cluster.take(key, other, kv_tokens=request.prompt_tokens)
                reserved = other
            elif reserved is None or reserved.story.state is WorkerState.LOST or is_doubted:
                self._release(request, out)
                self._retry(request, event.at, out)
                return
        request.decode = reserved.engine
        request.story.move(RequestMove.HAND_OFF)
        self._handles.send((request.id, request.attempt))
        is_vouched = prefill.vouches and reserved.engine.vouches
        self._send(request, Leg.DECODE, out, None if is_vouched else event.at + lease_s - self.rules.lease_margin_s)

    def _other_decode(self, request: Request, prefill: str, at: float) -> Worker | None:
        holder = self.cluster.get(prefill)
        if holder is None:
            return None
        workers = self.cluster.routable(request.facts.model, at)
        chosen = self._policies.pick_decode(request.pending(), holder, workers)
        return None if chosen is None else self.cluster[chosen]

    def _first_token_arrived(self, event: on.FirstTokenArrived, out: list[do.Command]) -> None:
        request = self._current(event.request, event.attempt)
        if request is None or not request.story.can(RequestMove.FIRST_TOKEN):
            return
        request.story.move(RequestMove.FIRST_TOKEN)
        self._handoff_arrived(request)
        if Leg.WHOLE in request.out:
            self.cluster.prompt_read(self._key(request, Leg.WHOLE))
            self._dispatch(event.at, out)

    def _request_finished(self, event: on.RequestFinished, out: list[do.Command]) -> None:
        request = self._current(event.request, event.attempt)
        if request is None or not request.story.can(RequestMove.FINISH):
            return
        self._handoff_arrived(request)
        for leg in (Leg.DECODE, Leg.WHOLE):
            if leg in request.out:
                request.out.remove(leg)
        if event.usage is not None:
            self._check_count(request, event.usage.prompt_tokens)
            self._learn_length(request, event.usage.prompt_tokens)
        self._end(request, RequestMove.FINISH, out)
        self._dispatch(event.at, out)

    def _handoff_arrived(self, request: Request) -> None:
        """D has written from the KV; nothing, where one worker does all."""
        self._handles.spend((request.id, request.attempt))
        if request.prefill is not None and request.decode is not None:
            self._pairs.arrived(request.prefill.worker, request.decode.worker)

    def _check_count(self, request: Request, prompt_tokens: int) -> None:
        """Two engines that make other tokens of one prompt must not hand over; this client has its answer already."""
        if request.counted_tokens in (None, prompt_tokens) or request.is_begun or request.prefill is None:
            return
        prefill, decode = _both(request)
        if not (prefill.vouches and decode.vouches):
            why = f"they count the same prompt differently: {request.counted_tokens} and {prompt_tokens} tokens"
            self._pairs.condemn(prefill.worker, decode.worker, why)

    def _leg_failed(self, event: on.LegFailed, out: list[do.Command]) -> None:
        request = self._current(event.request, event.attempt)
        if request is None or event.leg not in request.out:
            return
        self._lose_leg(request, event, out)
        self._dispatch(event.at, out)

    def _lose_leg(self, request: Request, event: on.LegFailed, out: list[do.Command]) -> None:
        self._blame(request, event, out)
        request.out.remove(event.leg)
        if request.story.state is not RequestState.STREAMING:
            self._after_failure(request, event, out)
        elif event.leg is Leg.PREFILL:  # it ran beside, and the client has its tokens: nobody's loss by now
            self.cluster.give_back(self._key(request, Leg.PREFILL))
        elif event.can_continue and request.strikes + 1 < self.rules.max_attempts:
            self._resume(request, event.at, out)
        else:
            self._fail(request, 502, Reason.UPSTREAM_FAILED, out)

    def _blame(self, request: Request, event: on.LegFailed, out: list[do.Command]) -> None:
        """What the failure says of the worker. A 4xx says nothing of it."""
        engine = request.prefill if event.leg is Leg.PREFILL else request.decode
        worker = self.cluster.get(engine.worker) if engine is not None else None
        if worker is None or engine is None or worker.facts.incarnation != engine.incarnation:
            return
        if event.failure is Failure.BUSY:
            asked_s = event.retry_after_s if event.retry_after_s is not None else 0.0
            pause_s = min(max(self.rules.pause_s, asked_s), self.rules.max_pause_s)
            worker.paused_until = max(worker.paused_until, event.at + pause_s)
            self._alarm(worker.paused_until)
        elif event.failure in _CONNECTION_LOST:
            worker.lose()
            out.append(do.ProbeWorker(worker=engine.worker))
        if event.failure not in (Failure.BUSY, Failure.REJECTED):
            request.avoid |= {engine.worker}
            if event.leg is Leg.DECODE and event.failure in _MAY_BE_THE_PAIR and request.prefill is not None:
                request.avoid |= {request.prefill.worker}
                self._blame_pair(request, request.prefill, engine, event, out)

    def _blame_pair(
        self, request: Request, prefill: Incarnation, decode: Incarnation, event: on.LegFailed, out: list[do.Command]
    ) -> None:
        if event.failure is Failure.MISCOUNTED:
            self._pairs.condemn(prefill.worker, decode.worker, "the two count the same prompt's tokens differently")
        else:
            self._pairs.strike(prefill.worker, decode.worker, request.id, event.at, event.failure)
            self._prove(event.at, out)

    def _after_failure(self, request: Request, event: on.LegFailed, out: list[do.Command]) -> None:
        """No token has reached the client: begin anew where that can help, else end with what is known."""
        self._cancel_legs(request, out)
        self._release(request, out)
        if event.failure is Failure.REJECTED:
            self._end(request, RequestMove.FAIL, out)
            out.append(do.RelayFailure(request=request.id))
            return
        request.strikes += event.failure in _STRIKES
        request.failed_handoffs += event.leg is Leg.DECODE or event.failure is Failure.NO_HANDLE
        if request.strikes >= self.rules.max_attempts and event.at < request.expires:
            if event.status is not None and event.failure is Failure.ERROR:
                self._end(request, RequestMove.FAIL, out)
                out.append(do.RelayFailure(request=request.id))
            elif event.failure is Failure.TIMED_OUT:
                self._fail(request, 504, Reason.DEADLINE_EXCEEDED, out)
            elif event.failure in _FAILED_HANDOFFS:
                self._fail(request, 503, Reason.HANDOFF_FAILED, out, retry_after_s=1)
            else:
                self._fail(request, 502, Reason.UPSTREAM_FAILED, out)
        else:
            self._retry(request, event.at, out, waits_anew=event.failure in _STRIKES)

    def _client_left(self, event: on.ClientLeft, out: list[do.Command]) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        self._cancel_legs(request, out)
        self._release(request, out)
        self._end(request, RequestMove.LEAVE, out)
        self._dispatch(event.at, out)

    # Workers

    def _worker_joined(self, event: on.WorkerJoined, out: list[do.Command]) -> None:
        facts = event.facts
        worker = self.cluster.get(facts.worker)
        served = [model for model in facts.models if self.cluster.has_ready(model)]
        is_new_engine = worker is None or worker.facts.incarnation != facts.incarnation or _may_be_another(worker, facts)
        if worker is None or worker.facts.incarnation != facts.incarnation:
            self._lose_older_engines(facts, event.at, out)
        if worker is None:
            worker = self.cluster.join(facts)
        else:
            worker.learn(facts)
        self._pairs.meet(worker, event.at, is_new_engine=is_new_engine)
        self._prove(event.at, out)
        for request in self._waiting:  # who waited for a first worker waits for its turn now, and no longer than for that
            if request.facts.model in facts.models and request.facts.model not in served:
                request.deadline = min(request.waits_since + self.rules.queue_timeout_s, request.expires)
                self._alarm(request.deadline)
        self._dispatch(event.at, out)

    def _lose_older_engines(self, facts: WorkerFacts, at: float, out: list[do.Command]) -> None:
        """Another engine answers at this address: whatever an older one was doing or holding is gone."""

        def is_older(other: Incarnation | None) -> bool:
            return other is not None and other.worker == facts.worker and other.incarnation != facts.incarnation

        self._handles.expire_of(is_older)
        for request in list(self._requests.values()):
            if request.story.state is RequestState.DECODING and is_older(request.prefill):
                self._begin_anew(request, Leg.DECODE, at, out)  # its KV is gone, whatever D makes of the handle
                continue
            for leg in request.out:
                if is_older(request.prefill if leg is Leg.PREFILL else request.decode):
                    if request.story.state is RequestState.STREAMING and leg is not Leg.PREFILL:
                        # only the driver knows whether another engine can go on with what the client has
                        out.append(do.BreakLeg(request=request.id, attempt=request.attempt, leg=leg))
                    else:
                        self._begin_anew(request, leg, at, out)
                    break  # the other leg went with it

    def _begin_anew(self, request: Request, leg: Leg, at: float, out: list[do.Command]) -> None:
        """The engine behind this leg has restarted; nobody else reports what became of the leg."""
        out.append(do.CancelLeg(request=request.id, attempt=request.attempt, leg=leg))
        failed = on.LegFailed(at=at, request=request.id, attempt=request.attempt, leg=leg, failure=Failure.RESTARTED)
        self._lose_leg(request, failed, out)

    def _worker_lost(self, event: on.WorkerLost, out: list[do.Command]) -> None:
        """Nothing new goes there. What runs there is not touched: its own connections tell how it ends."""
        worker = self.cluster.get(event.worker)
        if worker is not None:
            worker.lose()
            self._dispatch(event.at, out)  # who waited for it may go another way

    def _worker_removed(self, event: on.WorkerRemoved, out: list[do.Command]) -> None:
        worker = self.cluster.get(event.worker)
        if worker is not None:
            self._pairs.forget(worker)
            self.cluster.remove(event.worker)
            self._dispatch(event.at, out)

    def _drain_asked(self, event: on.DrainAsked, out: list[do.Command]) -> None:
        worker = self.cluster.get(event.worker)
        if worker is not None:
            worker.drain()
            self._dispatch(event.at, out)

    def _role_asked(self, event: on.RoleAsked, out: list[do.Command]) -> None:
        worker = self.cluster.get(event.worker)
        if worker is None or event.role not in worker.facts.allowed_roles or worker.role is event.role:
            return
        worker.role = event.role
        out.append(do.RecordRole(worker=event.worker, role=event.role, reason="manual"))
        self._prove(event.at, out)
        self._dispatch(event.at, out)

    # Pairs

    def _handoff_proved(self, event: on.HandoffProved, out: list[do.Command]) -> None:
        speed = event.moved_bytes / event.moved_s if event.moved_bytes and event.moved_s else None
        if self._pairs.proved(event.canary, event.at, event.took_s, speed):
            self._prove(event.at, out)
            self._dispatch(event.at, out)

    def _handoff_not_proved(self, event: on.HandoffNotProved, out: list[do.Command]) -> None:
        if self._pairs.not_proved(event.canary, event.at, event.took_s, event.why, was_tried=event.was_tried):
            self._prove(event.at, out)
            self._dispatch(event.at, out)  # who waited for this pair may go another way

    def _prove(self, at: float, out: list[do.Command]) -> None:
        """Send the canaries that are due."""
        if self.is_draining:
            return
        sent = self._pairs.send_due(at)
        out.extend(do.ProveHandoff(canary=pair.canary, prefill=pair.prefill, decode=pair.decode) for pair in sent)
        due = self._pairs.next_due(at)
        if due is not None:
            self._alarm(due)

    def _gateway_drained(self, event: on.GatewayDrained, out: list[do.Command]) -> None:
        self.is_draining = True

    # Time and handles

    def _time_passed(self, event: on.TimePassed, out: list[do.Command]) -> None:
        self._wakeup = None
        for request in self._waiting:
            if request.deadline > event.at:
                self._alarm(request.deadline)
            elif request.expires <= event.at:
                self._fail(request, 504, Reason.DEADLINE_EXCEEDED, out)
            else:
                has_worker = self.cluster.has_ready(request.facts.model)
                self._waiting.remove(request)
                self._refuse(request, Why.QUEUE_TIMEOUT if has_worker else Why.NO_WORKER, out)
        for request in list(self._requests.values()):
            if request.story.state not in _UNANSWERED:
                continue
            if request.expires > event.at:
                self._alarm(request.expires)
            else:
                self._cancel_legs(request, out)
                self._release(request, out)
                self._fail(request, 504, Reason.DEADLINE_EXCEEDED, out)
        next_expiry = self._handles.expire_orphans(event.at)
        if next_expiry is not None:
            self._alarm(next_expiry)
        for worker in self.cluster:
            if worker.paused_until > event.at:
                self._alarm(worker.paused_until)
        self._prove(event.at, out)
        self._dispatch(event.at, out)

    def _handle_released(self, event: on.HandleReleased, out: list[do.Command]) -> None:
        lease_end = self._handles.released((event.request, event.attempt), freed=event.freed)
        if lease_end is not None:
            self._alarm(max(lease_end, event.at))

    def _release(self, request: Request, out: list[do.Command]) -> None:
        released = self._handles.release((request.id, request.attempt))
        if released is None:
            return
        worker, was_sent = released
        # a handle is presented once: what a D was told of, only its engine or its lease can end
        reader = None if was_sent else self._reader(worker)
        out.append(do.ReleaseHandle(request=request.id, attempt=request.attempt, worker=worker, reader=reader))

    def _reader(self, prefill: str) -> str | None:
        """Somebody who could read what this worker holds."""
        holder = self.cluster.get(prefill)
        if holder is None:
            return None
        able = (name for name, state in sorted(holder.partners.items()) if state is PairState.PROVED)
        return next((name for name in able if self.cluster[name].story.state is not WorkerState.LOST), None)

    # Small steps

    @staticmethod
    def _key(request: Request, leg: Leg) -> LegKey:
        return LegKey(request.id, request.attempt, leg)

    def _current(self, request: str, attempt: int) -> Request | None:
        """The live request, if the attempt is still its own."""
        found = self._requests.get(request)
        return found if found is not None and found.attempt == attempt else None

    def _send(self, request: Request, leg: Leg, out: list[do.Command], trusted_until: float | None = None) -> None:
        request.out.append(leg)
        name, attempt = request.id, request.attempt
        if leg is Leg.WHOLE and request.decode is not None:
            out.append(do.SendWhole(request=name, attempt=attempt, worker=request.decode.worker))
            return
        prefill, decode = _both(request)
        if leg is Leg.PREFILL:
            out.append(do.SendPrefill(request=name, attempt=attempt, worker=prefill.worker))
        else:
            out.append(
                do.SendDecode(
                    request=name,
                    attempt=attempt,
                    worker=decode.worker,
                    prefill_worker=prefill.worker,
                    trusted_until=trusted_until,
                )
            )

    def _cancel_legs(self, request: Request, out: list[do.Command]) -> None:
        out.extend(do.CancelLeg(request=request.id, attempt=request.attempt, leg=leg) for leg in request.out)
        request.out.clear()

    def _give_back(self, request: Request) -> None:
        """Whatever this attempt still weighs on any worker."""
        for leg in Leg:
            key = self._key(request, leg)
            if self.cluster.holds(key):
                self.cluster.give_back(key)

    def _retry(self, request: Request, at: float, out: list[do.Command], *, waits_anew: bool = True) -> None:
        """Back to the head of the queue, if the request has time left. A worker that was busy or away cost no time worth a
        new wait."""
        if at >= request.expires:
            self._fail(request, 504, Reason.DEADLINE_EXCEEDED, out)
            return
        self._give_back(request)
        request.story.move(RequestMove.RETRY)
        if waits_anew:
            self._set_deadline(request, at)
        self._alarm(request.deadline)
        self._waiting.put_first(request)

    def _resume(self, request: Request, at: float, out: list[do.Command]) -> None:
        """Half an answer is out, and another engine can go on with it: to the head of the queue, with time anew."""
        self._cancel_legs(request, out)
        self._give_back(request)
        request.story.move(RequestMove.RESUME)
        request.strikes += 1
        request.is_begun = True
        request.expires = at + self.rules.request_timeout_s
        self._set_deadline(request, at)
        self._waiting.put_first(request)

    def _end(self, request: Request, move: RequestMove, out: list[do.Command]) -> None:
        if request.story.state is RequestState.WAITING:
            self._waiting.remove(request)
        self._cancel_legs(request, out)
        self._give_back(request)
        request.story.move(move)
        del self._requests[request.id]

    def _refuse(self, request: Request, why: Why, out: list[do.Command]) -> None:
        """Admission's no, or the end of a wait; the caller has taken the request out of its queue."""
        request.story.move(RequestMove.REFUSE)
        del self._requests[request.id]
        status, reason, retry_after_s = _REFUSALS[why]
        decision = Decision(Choice.REFUSE, why)
        out.append(do.RecordDecision(request=request.id, attempt=request.attempt, decision=decision))
        out.append(do.FailRequest(request=request.id, status=status, reason=reason, retry_after_s=retry_after_s))

    def _fail(
        self, request: Request, status: int, reason: Reason, out: list[do.Command], *, retry_after_s: int | None = None
    ) -> None:
        self._end(request, RequestMove.FAIL, out)
        out.append(do.FailRequest(request=request.id, status=status, reason=reason, retry_after_s=retry_after_s))

    def _learn_length(self, request: Request, prompt_tokens: int) -> None:
        if prompt_tokens > 0:
            self._policies.prompt_lengths.learn(request.facts, prompt_tokens)

    def _alarm(self, at: float) -> None:
        if self._wakeup is None or at < self._wakeup:
            self._wakeup = at

    # Invariants

    def validate(self) -> None:
        """Raise `AssertionError` where the books do not balance. Cheap enough for every step of a test."""
        self.cluster.validate(live=self._requests.keys())
        queued = sorted(request.id for request in self._waiting)
        waiting = sorted(r.id for r in self._requests.values() if r.story.state is RequestState.WAITING)
        _check(queued == waiting, f"queued {queued}, waiting {waiting}")
        self._pairs.validate()
        self._handles.validate(current={(request.id, request.attempt) for request in self._requests.values()})
        for request in self._requests.values():
            _check(request.story.state not in ENDS, f"{request.id} has ended and is still here")
            held = [leg for leg in Leg if self.cluster.holds(self._key(request, leg))]
            reserved = [Leg.DECODE] if request.story.state is RequestState.PREFILLING else []
            _check(held == sorted([*request.out, *reserved], key=list(Leg).index), f"{request.id}: {held}, {request.out}")


def _may_be_another(worker: Worker, facts: WorkerFacts) -> bool:
    """It was away, and nothing tells whether the same engine is back: that its pairs still stand must be shown anew."""
    return worker.story.state is WorkerState.LOST and not facts.incarnation and not facts.vouches


def _both(request: Request) -> tuple[Incarnation, Incarnation]:
    if request.prefill is None or request.decode is None:
        raise ValueError(f"{request.id} has no pair")
    return request.prefill, request.decode


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
