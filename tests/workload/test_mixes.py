"""Which lengths come together."""

from collections.abc import Callable
from math import nan
from random import Random

import msgspec
import pytest

from twinpool.errors import UserError
from twinpool.workload.lengths import Exactly, LogNormal, Uniform
from twinpool.workload.mixes import MIXES, Traffic, traffic_of


def _share(traffic: Traffic, at_s: float, is_so: Callable[[tuple[int, int]], bool]) -> float:
    rng = Random(7)
    return sum(is_so(traffic.draw(at_s, rng)) for _ in range(4000)) / 4000


def _is_long(lengths: tuple[int, int]) -> bool:
    return lengths[0] > 1500


def test_the_article_s_mix_is_60_to_40_with_no_length_between_the_classes() -> None:
    mix = MIXES["mixed-60-40"]
    assert _share(mix, 0, _is_long) == pytest.approx(0.4, abs=0.03)
    assert _share(mix, 0, lambda lengths: 900 < lengths[0] < 2000) == 0
    assert str(mix) == (
        "60% prompts of 100-900 tokens, answers of 100-300; 40% prompts of 2,000-4,000 tokens, answers of 100-300"
    )


def test_the_long_share_drifts_up_and_down() -> None:
    for at_s, share in ((0, 0.1), (150, 0.4), (300, 0.7), (450, 0.4), (600, 0.1), (9999, 0.1)):
        assert _share(MIXES["drift"], at_s, _is_long) == pytest.approx(share, abs=0.03)


def test_the_swing_jumps_between_two_mixes() -> None:
    swing = MIXES["swing"]
    for at_s, output_tokens in ((0, 60), (119, 60), (120, 500), (239, 500), (240, 60)):
        assert _share(swing, at_s, lambda lengths, wanted=output_tokens: lengths[1] == wanted) == 1


@pytest.mark.parametrize("drawn", [Exactly(7), Uniform(3, 9), LogNormal(median=50, sigma=2.0, low=10, high=200)])
def test_lengths_keep_to_their_bounds(drawn: Exactly | Uniform | LogNormal) -> None:
    rng = Random(1)
    found = [drawn.draw(rng) for _ in range(2000)]
    low, high = (drawn.tokens, drawn.tokens) if isinstance(drawn, Exactly) else (drawn.low, drawn.high)
    assert (min(found), max(found)) == (low, high)


def test_a_log_normal_has_its_median() -> None:
    rng = Random(1)
    found = sorted(LogNormal(median=300, sigma=0.6, low=1, high=100_000).draw(rng) for _ in range(4001))
    assert found[2000] == pytest.approx(300, rel=0.05)


def test_every_named_mix_reads_back_from_what_it_writes() -> None:
    for name, traffic in MIXES.items():
        assert traffic_of(msgspec.to_builtins(traffic), name) == traffic


_WHOLE = {"share": 1, "prompt": {"drawn": "exactly", "tokens": 9}, "output": {"drawn": "exactly", "tokens": 9}}
_MIX = {"kind": "mix", "parts": [_WHOLE]}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"kind": "mix", "parts": []}, "add up to 1"),
        ({"kind": "blend"}, "kind"),
        ({"kind": "mix", "parts": [{"share": 1, "prompt": {"drawn": "exactly", "tokens": 0}}]}, "length"),
        ({"kind": "mix", "parts": [{"share": 1, "prompt": {"drawn": "exactly", "tokens": 9}}]}, "output"),
        (
            {
                "kind": "mix",
                "parts": [_WHOLE | {"prompt": {"drawn": "lognormal", "median": 9, "sigma": nan, "low": 1, "high": 9}}],
            },
            "sigma",
        ),
        ({"kind": "drift", "start": _MIX, "to": _MIX, "points": [[nan, 0.5], [10, 0.5]]}, "rising"),
        ({"kind": "swing", "one": _MIX, "other": _MIX, "every_s": 1e-320}, "every_s"),
        ([1], "object"),
    ],
)
def test_a_mix_that_cannot_be_says_why(value: object, says: str) -> None:
    with pytest.raises(UserError, match=f"mix.json.*{says}"):
        traffic_of(value, "mix.json")
