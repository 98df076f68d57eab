"""The pairs as `GET /admin/state` tells them: how many stand how, and by name those in which something is wrong."""

from typing import Any

from twinpool.core.controller import Controller
from twinpool.core.lifecycle import PairState
from twinpool.core.pairs import Pair

_SHOWN = 50  # 64 workers make 4,032 pairs


def describe_pairs(controller: Controller) -> dict[str, Any]:
    """`troubled` has the pairs that are set aside or not proved yet, and why; `slow` those whose canary moved less than
    `handoff_floor_gb_s` gigabytes a second: TCP, most likely, where RDMA was meant."""
    pairs = list(controller.pairs())
    counts = {str(state): sum(pair.state is state for pair in pairs) for state in PairState}
    troubled = [pair for pair in pairs if pair.state is not PairState.PROVED]
    slow = [pair for pair in pairs if pair.is_slow]
    return {
        **counts,
        "troubled": [_describe(pair) for pair in troubled[:_SHOWN]],
        "slow": [_describe(pair) for pair in slow[:_SHOWN]],
        "handoff_floor_gb_s": controller.rules.handoff_floor_gb_s,
    }


def _describe(pair: Pair) -> dict[str, Any]:
    return {
        "prefill": pair.prefill,
        "decode": pair.decode,
        "state": str(pair.state),
        "why": pair.trouble or ("a canary is on its way" if pair.canary else "its canary has not set out yet"),
        "strikes": pair.strikes,
        "gb_s": None if pair.bytes_per_s is None else round(pair.bytes_per_s / 1e9, 3),
    }
