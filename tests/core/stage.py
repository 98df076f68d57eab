"""A controller on a stage: tells it events in the words of a story, plays the clock, and keeps everything that was said.

The short names of the workers say what they are: p1 prefills, d1 decodes, c1 is colocated. Every event is followed by
`controller.validate()`.
"""

from typing import Any

import msgspec

from twinpool.assemble import build_controller
from twinpool.config import Routing
from twinpool.core import commands as do
from twinpool.core import events as on
from twinpool.core.cluster import Worker
from twinpool.core.decisions import Decision, Why
from twinpool.core.lifecycle import HandleState
from twinpool.core.model import Dialect, Failure, Leg, RequestFacts, Role, Usage, WorkerFacts
from twinpool.core.pairs import Pair
from twinpool.measure.timeline import Timeline

CHARS_PER_TOKEN = 4
"""Of an ASCII prompt before anything was learnt."""

_ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}


def worker(
    name: str,
    *,
    role: Role | None = None,
    incarnation: str = "1",
    dialect: Dialect | None = Dialect.NIXL,
    models: tuple[str, ...] = ("m",),
    slots: int | None = 8,
    lease_s: float | None = None,
    serves_whole: bool = True,
    continues: bool = False,
    allowed_roles: tuple[Role, ...] = tuple(Role),
    vouches: bool = True,
    **more: Any,
) -> WorkerFacts:
    """Facts of a worker whose role follows from the first letter of its name."""
    return WorkerFacts(
        worker=name,
        url=f"http://{name}.example",
        incarnation=incarnation,
        engine="scripted",
        models=models,
        role=role or _ROLES[name[0]],
        allowed_roles=allowed_roles,
        dialect=dialect,
        slots=slots,
        lease_s=lease_s,
        serves_whole=serves_whole,
        continues=continues,
        vouches=vouches,
        **more,
    )


def stock(name: str, **facts: Any) -> WorkerFacts:
    """A worker whose engine does not verify the handles it is given: each of its pairs must be proved."""
    return worker(name, vouches=False, **facts)


def prompt(
    tokens: int = 100,
    *,
    model: str = "m",
    sequences: int = 1,
    obstacle: Why | None = None,
    tenant: str = "",
    priority: int = 0,
) -> RequestFacts:
    """Facts of a chat request whose prompt is guessed at `tokens` tokens."""
    return RequestFacts(
        model=model,
        endpoint="chat",
        stream=True,
        prompt_chars=tokens * CHARS_PER_TOKEN,
        sequences=sequences,
        obstacle=obstacle,
        tenant=tenant,
        priority=priority,
    )


class Stage:
    """`at` is the time of the next event. What each telling returns are the commands, without their records."""

    def __init__(self, *workers: WorkerFacts, rules: Routing | None = None) -> None:
        self.controller = build_controller(rules or Routing())
        self.at = 0.0
        self.events: list[on.Event] = []
        self.commands: list[list[do.Command]] = []
        self.decisions: list[Decision] = []
        self.pair_news: list[do.RecordPair] = []
        self._attempts: dict[str, int] = {}
        for facts in workers:
            self.joins(facts)

    # What is told

    def tell(self, event: on.Event) -> list[do.Command]:
        commands = self.controller.handle(event)
        self.controller.validate()
        self.events.append(event)
        self.commands.append(commands)
        acts: list[do.Command] = []
        for command in commands:
            if isinstance(command, do.RecordDecision):
                self.decisions.append(command.decision)
            elif isinstance(command, do.RecordPair):
                self.pair_news.append(command)
            else:
                acts.append(command)
            if isinstance(command, do.SendPrefill | do.SendDecode | do.SendWhole):
                self._attempts[command.request] = command.attempt
        return acts

    def arrives(self, request: str, facts: RequestFacts | None = None) -> list[do.Command]:
        return self.tell(on.RequestArrived(at=self.at, request=request, facts=facts or prompt()))

    def prefilled(self, request: str, *, tokens: int = 100, attempt: int | None = None) -> list[do.Command]:
        attempt = self.attempt(request, attempt)
        return self.tell(on.PrefillFinished(at=self.at, request=request, attempt=attempt, prompt_tokens=tokens))

    def first_token(self, request: str, *, attempt: int | None = None) -> list[do.Command]:
        return self.tell(on.FirstTokenArrived(at=self.at, request=request, attempt=self.attempt(request, attempt)))

    def finishes(self, request: str, *, attempt: int | None = None, usage: Usage | None = None) -> list[do.Command]:
        timeline = Timeline(arrived=0.0, ended=self.at)
        attempt = self.attempt(request, attempt)
        return self.tell(on.RequestFinished(at=self.at, request=request, attempt=attempt, timeline=timeline, usage=usage))

    def fails(
        self,
        request: str,
        leg: Leg,
        failure: Failure,
        *,
        attempt: int | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
        can_continue: bool = False,
    ) -> list[do.Command]:
        event = on.LegFailed(
            at=self.at,
            request=request,
            attempt=self.attempt(request, attempt),
            leg=leg,
            failure=failure,
            status=status,
            retry_after_s=retry_after_s,
            can_continue=can_continue,
        )
        return self.tell(event)

    def leaves(self, request: str) -> list[do.Command]:
        return self.tell(on.ClientLeft(at=self.at, request=request))

    def released(self, request: str, *, freed: bool, attempt: int | None = None) -> list[do.Command]:
        attempt = self.attempt(request, attempt)
        return self.tell(on.HandleReleased(at=self.at, request=request, attempt=attempt, freed=freed))

    def joins(self, facts: WorkerFacts) -> list[do.Command]:
        return self.tell(on.WorkerJoined(at=self.at, facts=facts))

    def restarts(self, name: str, *, incarnation: str = "2") -> list[do.Command]:
        """Another engine answers where the worker was, all else as it was."""
        return self.joins(msgspec.structs.replace(self.worker(name).facts, incarnation=incarnation))

    def returns(self, name: str) -> list[do.Command]:
        """A probe finds the same engine well."""
        return self.joins(self.worker(name).facts)

    def proves(
        self, canary: int, *, took_s: float = 0.1, moved_bytes: int | None = None, moved_s: float | None = None
    ) -> list[do.Command]:
        event = on.HandoffProved(at=self.at, canary=canary, took_s=took_s, moved_bytes=moved_bytes, moved_s=moved_s)
        return self.tell(event)

    def fails_canary(
        self, canary: int, *, took_s: float = 0.1, why: str = "no KV came", was_tried: bool = True
    ) -> list[do.Command]:
        return self.tell(on.HandoffNotProved(at=self.at, canary=canary, took_s=took_s, why=why, was_tried=was_tried))

    def loses(self, name: str) -> list[do.Command]:
        return self.tell(on.WorkerLost(at=self.at, worker=name, reason="no answer"))

    def removes(self, name: str) -> list[do.Command]:
        return self.tell(on.WorkerRemoved(at=self.at, worker=name))

    def drains(self, name: str) -> list[do.Command]:
        return self.tell(on.DrainAsked(at=self.at, worker=name))

    def asks(self, name: str, role: Role) -> list[do.Command]:
        return self.tell(on.RoleAsked(at=self.at, worker=name, role=role))

    def gateway_drains(self) -> list[do.Command]:
        return self.tell(on.GatewayDrained(at=self.at))

    def waits(self, seconds: float) -> list[do.Command]:
        """Time goes by; the controller is woken whenever it asked for it."""
        until = self.at + seconds
        acts: list[do.Command] = []
        while (due := self.controller.next_wakeup()) is not None and due <= until:
            self.at = max(self.at, due)
            acts += self.tell(on.TimePassed(at=self.at))
        self.at = until
        return acts

    # What can be seen

    def attempt(self, request: str, given: int | None = None) -> int:
        """The given attempt, or the one the request is at."""
        return given if given is not None else self._attempts.get(request, 0)

    def worker(self, name: str) -> Worker:
        return self.controller.cluster[name]

    def pair(self, prefill: str, decode: str) -> Pair:
        return next(pair for pair in self.controller.pairs() if (pair.prefill, pair.decode) == (prefill, decode))

    def pairs(self) -> dict[str, str]:
        """The state of each pair, by `p1>d1`."""
        return {f"{pair.prefill}>{pair.decode}": str(pair.state) for pair in self.controller.pairs()}

    def load(self, name: str) -> tuple[int, int, int]:
        """Prompt tokens to read, tokens of KV, sequences."""
        seen = self.worker(name)
        return seen.prefill_tokens, seen.kv_tokens, seen.sequences

    @property
    def handles(self) -> dict[HandleState, int]:
        return self.controller.handles_by_state()

    def is_empty(self) -> bool:
        """No request, no handle, no load."""
        loads = [self.load(seen.facts.worker) for seen in self.controller.cluster]
        return not self.controller.live_requests and not self.handles and set(loads) <= {(0, 0, 0)}
