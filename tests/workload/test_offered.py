"""Arrivals and lengths put together."""

from itertools import islice
from random import Random

import pytest

from twinpool.workload.arrivals import Constant, Poisson
from twinpool.workload.mixes import MIXES
from twinpool.workload.offered import Offered, offered, scaled

MIX = MIXES["mixed-60-40"]


def test_it_ends_in_time_and_the_seed_says_it_all() -> None:
    one, again, other = (list(offered(Poisson(rate=20), MIX, Random(seed), duration_s=30)) for seed in (1, 1, 2))
    assert one == again != other
    assert one[0].at_s > 0
    assert one[-1].at_s < 30
    assert all(request.is_long == (request.prompt_tokens > 1500) for request in one)


def test_another_rate_offers_the_same_requests_at_other_times() -> None:
    slow, fast = (list(islice(offered(Poisson(rate=rate), MIX, Random(1), duration_s=1e9), 50)) for rate in (1, 30))
    assert [request.prompt_tokens for request in slow] == [request.prompt_tokens for request in fast]
    assert slow[-1].at_s == pytest.approx(30 * fast[-1].at_s)


def test_the_border_of_long_prompts_can_be_set() -> None:
    requests = list(offered(Constant(rate=10), MIX, Random(1), duration_s=20, long_prompt_tokens=500))
    assert any(request.is_long and request.prompt_tokens < 1500 for request in requests)


def test_scaling_divides_lengths_and_keeps_the_class() -> None:
    requests = [
        Offered(0.0, 1600, 100, is_long=True, prefix=(4,)),
        Offered(8.0, 5, 1, is_long=False),
        Offered(99.0, 1, 1, is_long=False),
    ]
    assert list(scaled(requests, rate=4, lengths=10, duration_s=3)) == [
        Offered(0.0, 160, 10, is_long=True, prefix=(4,)),
        Offered(2.0, 1, 1, is_long=False),
    ]


@pytest.mark.parametrize("scale", [{"rate": 0}, {"lengths": -1}])
def test_a_scale_that_is_none_is_refused(scale: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="scale"):
        list(scaled([], **scale))
