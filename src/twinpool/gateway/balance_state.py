"""What balance found and what came of it, in plain words: for `twinpool status` and `GET /admin/decisions`."""

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from time import monotonic
from typing import Any

import msgspec

from twinpool.config import BalanceMode
from twinpool.core.decisions import Balanced, WhyBalance

_KEPT = 100

BECAUSE = {
    WhyBalance.MANUAL: "a person asked for it",
    WhyBalance.PREFILL_SHORT: "prompts are more than their pool can read",
    WhyBalance.DECODE_SHORT: "answers are more than their pool can write",
    WhyBalance.POOL_EMPTY: "nobody was left in that pool",
    WhyBalance.NOT_KNOWN: "too little has been seen yet of what work costs here",
    WhyBalance.FIXED: "no worker may change its pool",
    WhyBalance.ALONE: "one worker does everything",
    WhyBalance.IDLE: "nothing is asked for",
    WhyBalance.EASY: "no pool has much to do",
    WhyBalance.GOOD: "no other split would be better by enough",
    WhyBalance.RESTING: "a worker has moved just now",
    WhyBalance.SETTLING: "another split looks better, but has not for long enough",
    WhyBalance.ONE_POOL: "two pools would carry less of this traffic",
    WhyBalance.HOPELESS: "a step alone takes longer than --slo-itl: no split can keep that",
}
_NOT_LOOKED = "nothing yet, because nothing was asked for, no worker may take either role, or what work costs is not known"


class Outcome(StrEnum):
    """What came of a look."""

    DID = "did"
    WOULD_DO = "would_do"  # advice
    NOTHING = "nothing"


class Balances:
    """The last looks at which balance found something new, the oldest first. Advice that is given again is not."""

    def __init__(self, mode: BalanceMode) -> None:
        self.mode = mode
        self._kept: deque[tuple[float, Balanced]] = deque(maxlen=_KEPT)

    def found(self, at: float, balanced: Balanced) -> None:
        """`at` is on `time.monotonic`."""
        if self._kept and self.mode is BalanceMode.ADVISE and _is_same(self._kept[-1][1], balanced):
            at, _ = self._kept.pop()
        self._kept.append((at, balanced))

    def describe(self, last: Balanced | None, shown: int) -> dict[str, Any] | None:
        """For the state: what was found at the last look, and some of those before. None where balance is off."""
        if self.mode is BalanceMode.OFF:
            return None
        now = {"words": _NOT_LOOKED} if last is None else self._described(last)
        return {"mode": str(self.mode), **now, "recent": self.recent(shown)}

    def recent(self, count: int) -> list[dict[str, Any]]:
        return list(self._recent(count))

    def _recent(self, count: int) -> Iterator[dict[str, Any]]:
        for at, balanced in list(self._kept)[-count:]:
            yield {"age_s": round(monotonic() - at, 3), **self._described(balanced)}

    def _described(self, balanced: Balanced) -> dict[str, Any]:
        outcome = self._outcome(balanced)
        return {**msgspec.to_builtins(balanced), "outcome": str(outcome), "words": words(balanced, outcome)}

    def _outcome(self, balanced: Balanced) -> Outcome:
        if balanced.worker is None and not balanced.is_one_pool:
            return Outcome.NOTHING
        return Outcome.DID if self.mode is BalanceMode.AUTO else Outcome.WOULD_DO


def words(balanced: Balanced, outcome: Outcome) -> str:
    """One sentence, without a full stop."""
    because = f"because {BECAUSE[balanced.why]}{_load(balanced)}"
    if outcome is Outcome.NOTHING:
        return f"nothing, {because}"
    if balanced.is_one_pool:
        what = "everybody does everything" if outcome is Outcome.DID else "would let everybody do everything"
    else:
        what = f"{'moved' if outcome is Outcome.DID else 'would move'} {balanced.worker} to {balanced.role}"
    return f"{what}, {because}"


def _load(found: Balanced) -> str:
    """The shares that this traffic is of what the splits carry, where they were weighed."""
    if found.pressure is None:
        return ""
    text = f" ({found.prefill} prefill and {found.decode} decode are at {found.pressure:.0%} of what they carry"
    if found.is_one_pool and found.one_pool_pressure is not None:
        return f"{text}, one pool would be at {found.one_pool_pressure:.0%})"
    if found.best_prefill not in (None, found.prefill) and found.best_pressure is not None:
        best_decode = found.prefill + found.decode - found.best_prefill
        return f"{text}, {found.best_prefill} and {best_decode} would be at {found.best_pressure:.0%})"
    return f"{text})"


def _is_same(one: Balanced, other: Balanced) -> bool:
    """Whoever of the pool is named: the one that has least to do changes from look to look."""
    return (one.why, one.role) == (other.why, other.role)
