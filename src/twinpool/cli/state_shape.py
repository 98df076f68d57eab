"""What `twinpool status` draws of a gateway's state: whatever has not this shape is no gateway's."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class _Gateway(msgspec.Struct):
    url: str
    models: list[str]
    draining: bool


class _Worker(msgspec.Struct):
    id: str
    url: str
    role: Literal["prefill", "decode", "colocated"]
    state: str
    reason: str | None
    engine: str | None
    slots: int | None
    sequences: int
    prefill_tokens: int
    kv_tokens: int
    kind: str | None = None
    obstacle: str | None = None
    warning: str | None = None
    advice: list[str] = []
    connector: str | UnsetType | None = UNSET
    kv_role: str | UnsetType | None = UNSET
    lease_s: float | UnsetType | None = UNSET
    budget_tokens: int | UnsetType | None = UNSET
    kv_capacity_tokens: int | UnsetType | None = UNSET
    hands_off: bool | UnsetType = UNSET
    busy_ratio: float | None = None
    held: bool = False

    def __post_init__(self) -> None:
        told = (self.connector, self.kv_role, self.lease_s, self.budget_tokens, self.kv_capacity_tokens, self.hands_off)
        if self.kind not in (None, "embedded") and UNSET in told:
            raise ValueError("an engine that is not ours has its connector, lease and budget told")


class _Requests(msgspec.Struct):
    live: int
    waiting: int


class _Decision(msgspec.Struct):
    age_s: float
    choice: str
    why: str
    prefill: str | None
    decode: str | None
    words: str = ""
    ttft_s: float | None = None
    predicted_ttft_s: float | None = None


class _Finding(msgspec.Struct):
    words: str
    do: str | None


class _Health(msgspec.Struct):
    tone: Literal["good", "warn", "bad"]
    words: str
    findings: list[_Finding]


class _RoleChange(msgspec.Struct):
    age_s: float
    why: str
    words: str


class _Indicators(msgspec.Struct):
    verdict: Literal["pass", "fail", "unknown"]
    reasons: list[str]
    useful_work_ratio: float | None


class _Incompatible(msgspec.Struct):
    prefill: str
    decode: str
    why: str


class _Troubled(_Incompatible):
    state: str


class _Slow(msgspec.Struct):
    prefill: str
    decode: str
    gb_s: float


class _Pairs(msgspec.Struct):
    proved: int = 0
    unproved: int = 0
    aside: int = 0
    troubled: list[_Troubled] = []
    slow: list[_Slow] = []


class State(msgspec.Struct):
    version: str
    uptime_s: float
    gateway: _Gateway
    workers: list[_Worker]
    requests: _Requests
    handles: dict[str, int]
    decisions: list[_Decision]
    indicators: _Indicators | None = None
    pairs: _Pairs = msgspec.field(default_factory=_Pairs)
    incompatible: list[_Incompatible] = []
    health: _Health | None = None
    role_changes: list[_RoleChange] = []
