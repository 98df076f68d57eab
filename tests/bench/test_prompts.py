"""Prompts of a wanted length."""

import pytest

from twinpool.bench.prompts import NONCE_WORDS, Prompts, fit
from twinpool.workload.offered import Offered


def _words(prompts: Prompts, tokens: int, prefix: tuple[int, ...] = ()) -> list[str]:
    return prompts.text(Offered(0.0, tokens, 1, is_long=False, prefix=prefix)).split(" ")


@pytest.mark.parametrize("tokens", [1, 7, NONCE_WORDS, NONCE_WORDS + 1, 500, 100_000, 450_000])
def test_as_many_words_as_tokens_where_each_is_one(tokens: int) -> None:
    assert len(_words(Prompts(), tokens)) == tokens


def test_a_template_and_a_rate_are_taken_off() -> None:
    assert len(_words(Prompts(base_tokens=40, tokens_per_word=1.5), 340)) == 200
    assert len(_words(Prompts(base_tokens=40), 10)) == 1  # shorter than it can be


def test_the_first_words_are_fresh_each_time() -> None:
    prompts = Prompts()
    assert len({tuple(_words(prompts, 600)[:NONCE_WORDS]) for _ in range(500)}) == 500


def test_a_trace_s_blocks_are_shared_within_a_run_and_never_between_runs() -> None:
    one, other = Prompts(), Prompts()
    first, second = _words(one, 1200, (5, 6)), _words(one, 1100, (5, 7))
    assert len(first) == 1200
    assert first[:512] == second[:512]
    assert first[512:1024] != second[512:1024]
    assert first[:16] != _words(other, 1200, (5, 6))[:16]


def test_blocks_shrink_with_the_lengths() -> None:
    prompts = Prompts(length_divisor=8)
    first, second = _words(prompts, 100, (5, 6)), _words(prompts, 100, (5, 7))
    assert first[:64] == second[:64]
    assert first[64:] != second[64:]


def test_the_line_through_what_was_counted() -> None:
    assert fit([(16, 52), (160, 340)]) == (20, 2)
