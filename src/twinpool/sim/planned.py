"""What a plan says of one option."""

import msgspec

from twinpool.sim.climb import Climbed, Outcome
from twinpool.sim.options import Option, Way


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """`capacity_req_s` is the highest rate at which nine in ten requests meet the objectives; None where the option was not
    searched for it (`outcome` says why). `fell_short_req_s` is a rate that it did not carry, one that another option of its
    way does. The figures under them are at the rate that was asked for, of those that were searched."""

    prefill: int
    decode: int
    colocated: int
    balance: bool
    budget_tokens: int
    outcome: Outcome
    bound_req_s: float
    capacity_req_s: float | None = None
    fell_short_req_s: float | None = None
    goodput_req_s: float | None = None
    attainment_ratio: float | None = None
    ttft_s: dict[str, float] | None = None
    ttft_short_mean_s: float | None = None
    ttft_long_mean_s: float | None = None
    itl_p99_s: float | None = None
    itl_worst_p99_s: float | None = None
    utilization_mean_ratio: float | None = None
    useful_work_ratio: float | None = None
    cost_per_million_output_tokens: float | None = None
    beyond_table_ratio: float | None = None
    handoff_bytes_s_per_decode_worker: float | None = None
    role_changes: int | None = None

    @classmethod
    def of(cls, option: Option, bound_req_s: float, climbed: Climbed) -> "Planned":
        """Without the figures."""
        return cls(
            prefill=option.prefill,
            decode=option.decode,
            colocated=option.colocated,
            balance=option.way is Way.BALANCED,
            budget_tokens=option.budget_tokens,
            outcome=climbed.outcome,
            bound_req_s=bound_req_s,
            capacity_req_s=climbed.req_s if climbed.outcome is Outcome.SEARCHED else None,
            fell_short_req_s=climbed.req_s if climbed.outcome is Outcome.FELL_SHORT else None,
        )

    def way(self) -> Way:
        if self.balance:
            return Way.BALANCED
        return Way.COLOCATED if self.colocated else Way.POOLS

    def option(self) -> Option:
        return Option(self.way(), self.prefill, self.decode, self.colocated, self.budget_tokens)

    def name(self) -> str:
        return str(self.option())

    def short_name(self) -> str:
        """Among options of its way."""
        if self.way() is Way.POOLS:
            return f"{self.prefill}:{self.decode}"
        return f"budget {self.budget_tokens:,}"

    def has_a_rate(self) -> bool:
        """That it carries, or does not."""
        return bool(self.capacity_req_s or self.fell_short_req_s)

    def why_no_figures(self) -> str:
        if self.outcome is Outcome.SEARCHED:
            return "meets the objectives at no rate"
        if self.outcome is Outcome.FELL_SHORT:
            return f"does not carry {self.fell_short_req_s:.1f}"
        return "its bound is below the best" if self.outcome is Outcome.BOUND_BELOW else "behind one that fell short"
