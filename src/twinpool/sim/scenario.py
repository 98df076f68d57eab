"""A scenario: what is simulated, as a TOML file says it. Parsing only; `shelf` reads the files, `run` runs them.

    duration_s = 300
    [traffic]
    mix = "mixed-60-40"                         # a name, or a table with kind = "mix", "drift" or "swing"
    arrivals = {shape = "poisson", rate = 60}   # constant, poisson, burst, ramp
    [[workers]]
    count = 5
    role = "prefill"
    profile = "llama-3.1-70b-h100-tp8"
    budget_tokens = 2048

Arms (`[[arms]]`, each with its own `workers`) put several fleets before the same requests.
"""

import tomllib
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from twinpool.config import Balance, BalanceMode, Count, Objectives, Routing, Seconds
from twinpool.core.model import Role
from twinpool.errors import UserError
from twinpool.sim.engine import Scheduling
from twinpool.workload.arrivals import Shape

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Ratio = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
_Moment = Annotated[float, msgspec.Meta(ge=0, le=10_000_000)]
_Workers = Annotated[int, msgspec.Meta(ge=1, le=10_000)]  # each is an engine in memory
_Every = Annotated[float, msgspec.Meta(ge=1e-3, le=10_000_000)]  # seconds; more often, a simulation does nothing else


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A misspelt key must not pass for a setting."""


class TrafficSpec(_Table, frozen=True):
    """Either a mix and its arrivals, or a trace (a name of the shelf, or a path) played `rate_scale` times as fast, with its
    lengths divided by `length_divisor`."""

    mix: str | dict[str, Any] | None = None
    arrivals: Shape | None = None
    trace: str | None = None
    rate_scale: _Ratio = 1.0
    length_divisor: _Ratio = 1.0

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.mix is None or self.arrivals is None):
            raise ValueError("traffic is either a trace, or a mix with its arrivals")


class WorkerGroup(_Table, frozen=True):
    """`count` equal workers. The expectations (`model`, `engine`, `kv_tokens`, `tensor_parallel`, `flags`) refuse a profile
    that was taken with something else. `budget_by_role` is a what-if: no engine has it. `slowness` 2 takes twice the
    profile's time."""

    count: _Workers
    role: Role
    profile: str
    budget_tokens: Count = 2048
    budget_by_role: dict[str, Count] = {}
    allowed_roles: tuple[Role, ...] = ()
    scheduling: Scheduling = Scheduling.CHUNKED
    caches_prefixes: bool = True
    sequences: Count | None = None
    handoff_bytes_per_s: _Positive | None = None
    handoff_latency_s: _Moment | None = None
    mixed_step_extra_ms: Annotated[float, msgspec.Meta(ge=0, le=1e7)] | None = None
    slowness: _Ratio = 1.0
    model: str | None = None
    engine: str | None = None
    kv_tokens: int | None = None
    tensor_parallel: int | None = None
    flags: dict[str, str | int | float | bool] = {}

    def __post_init__(self) -> None:
        for role in self.budget_by_role:
            if role not in {each.value for each in Role}:
                raise ValueError(f"budget_by_role names {role!r}, which is no role")


class FaultKind(StrEnum):
    CRASH = "crash"  # the engine dies; another one is there `lasts_s` later (start-up time), with another incarnation
    SLOW = "slow"  # every step takes `factor` times as long, for `lasts_s`
    SLOW_LINK = "slow_link"  # both its ports pass 1/factor of their bytes, for `lasts_s`
    LOST = "lost"  # probes get no answer for `lasts_s`; what runs there goes on
    DRAIN = "drain"  # somebody drains it
    ROLE = "role"  # somebody asks for `role`


class Fault(_Table, frozen=True):
    """What happens to one worker (`w000` on, in the order of the groups) at a moment."""

    at_s: _Moment
    worker: str
    kind: FaultKind
    lasts_s: Seconds = 30.0
    factor: _Ratio = 2.0
    role: Role | None = None

    def __post_init__(self) -> None:
        if (self.kind is FaultKind.ROLE) is (self.role is None):
            raise ValueError("a fault of kind role, and no other, names a role")


class Clients(_Table, frozen=True):
    """`chars_per_token` of their prompts: the policies start from 4 and learn. One that has waited `patience_s` for its first
    token leaves."""

    chars_per_token: _Ratio = 4.0
    patience_s: Seconds | None = None


class Gateway(_Table, frozen=True):
    """The way between gateway and engines. A leg is `dispatch_s` on its way; a lost worker is looked at every
    `probe_interval_s`. Every `load_reports_s` each engine says how full it is (None: it tells nothing, as the embedded worker),
    and what it says is `load_age_s` old when the gateway has it."""

    dispatch_s: _Moment = 0.0
    probe_interval_s: _Every = 1.0
    load_reports_s: _Every | None = None
    load_age_s: _Moment = 0.0
    lease_s: Seconds = 30.0
    continues: bool = True


class Claim(_Table, frozen=True):
    """What somebody says comes out: the value at `key` (dots go deeper) of `arm`, as a ratio to `over`'s where that is
    given."""

    what: str
    claimed: float
    arm: str
    key: str
    over: str | None = None


class Arm(_Table, frozen=True):
    name: str
    workers: tuple[WorkerGroup, ...]
    about: str = ""

    def __post_init__(self) -> None:
        if not self.workers:
            raise ValueError("an arm has workers")


class Scenario(_Table, frozen=True):
    """What is counted of its time: `measure.blocks`. Where it `knows_costs`, the gateway has the profiles."""

    name: str
    traffic: TrafficSpec
    duration_s: Seconds
    about: str = ""
    seed: int = 1
    objectives: Objectives = Objectives()
    routing: Routing = Routing()
    balance: Balance = Balance(mode=BalanceMode.OFF)
    knows_costs: bool = True
    clients: Clients = Clients()
    gateway: Gateway = Gateway()
    workers: tuple[WorkerGroup, ...] = ()
    arms: tuple[Arm, ...] = ()
    faults: tuple[Fault, ...] = ()
    claims: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.workers) is bool(self.arms):
            raise ValueError("a scenario has either workers or arms")
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError("two arms have the same name")
        for claim in self.claims:
            for name in (claim.arm, claim.over):
                if name is not None and name not in names:
                    raise ValueError(f"a claim names the arm {name!r}, which is not there")

    def all_arms(self) -> tuple[Arm, ...]:
        return self.arms or (Arm(name=self.name, workers=self.workers),)


def parse_scenario(text: str, origin: str) -> Scenario:
    """`origin` (a path or a name) serves the message of the `UserError` that a broken one raises."""
    try:
        return msgspec.convert(tomllib.loads(text), Scenario)
    except (tomllib.TOMLDecodeError, RecursionError) as broken:
        raise UserError(f"{origin} is not valid TOML: {broken}") from broken
    except (msgspec.ValidationError, UserError) as wrong:
        raise UserError(f"{origin}: {wrong}") from wrong
