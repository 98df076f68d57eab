"""A worker shows how fast it reads, however slow it is and however seldom it rests."""

import pytest

from twinpool.core.meters import NEWBORN_LEGS, Meter, ReadingSeen


def read_without_rest(prompts: int, tokens: int, token_s: float) -> list[ReadingSeen]:
    """One after the other, while others wait."""
    meter = Meter()
    meter.has_to_read(0.0)
    seen = [meter.read((n + 1) * tokens * token_s, tokens, 0, is_last=False) for n in range(prompts)]
    return [each for each in seen if each is not None]


@pytest.mark.parametrize("token_s", [5e-5, 1e-3, 0.03])
@pytest.mark.parametrize("tokens", [150, 4000])
def test_one_that_never_rests_is_seen_all_the_same(tokens: int, token_s: float) -> None:
    found = read_without_rest(NEWBORN_LEGS + 500, tokens, token_s)
    assert found
    for seen in found:
        assert seen.seconds == pytest.approx(seen.tokens * token_s)
        assert seen.tokens >= 16_384 or (seen.seconds >= 5.0 and seen.prompts >= 4)


def test_a_slow_one_is_known_within_fifty_prompts() -> None:
    """135 million parameters on a part of a core."""
    assert len(read_without_rest(50, 150, 0.03)) >= 8
