"""Guesses of a prompt's length, and what they learn."""

import msgspec
import pytest
from tests.core.stage import prompt

from twinpool.core.model import RequestFacts
from twinpool.policy.estimates import PromptLengths


def text(chars: int, *, is_ascii: bool = True) -> RequestFacts:
    return msgspec.structs.replace(prompt(), prompt_chars=chars, is_ascii=is_ascii)


@pytest.mark.parametrize(
    ("chars", "is_ascii", "tokens"), [(400, True, 100), (400, False, 240), (0, True, 1), (1, False, 1), (6, True, 2)]
)
def test_the_first_guess(chars: int, is_ascii: bool, tokens: int) -> None:
    assert PromptLengths().tokens(text(chars, is_ascii=is_ascii)) == tokens


def test_it_comes_to_what_the_engines_count() -> None:
    lengths = PromptLengths()
    for _ in range(100):
        lengths.learn(text(1000), 500)
    assert 495 <= lengths.tokens(text(1000)) <= 500


def test_one_odd_prompt_moves_it_little() -> None:
    lengths = PromptLengths()
    lengths.learn(text(1000), 1000)
    assert lengths.tokens(text(1000)) == 288


def test_one_script_says_nothing_of_another() -> None:
    lengths = PromptLengths()
    for _ in range(100):
        lengths.learn(text(1000, is_ascii=False), 2000)
    assert lengths.tokens(text(1000)) == 250
    assert lengths.tokens(text(1000, is_ascii=False)) > 1900


def test_short_prompts_teach_nothing() -> None:
    lengths = PromptLengths()
    lengths.learn(text(199), 10_000)
    assert lengths.tokens(text(1000)) == 250
    lengths.learn(text(200), 200)
    assert lengths.tokens(text(1000)) > 250


def test_the_error_is_that_of_guesses_before_they_were_learnt_from() -> None:
    lengths = PromptLengths()
    assert lengths.error_ratio == 0.0
    for _ in range(200):
        lengths.learn(text(1000), 500)
    assert lengths.error_ratio < 0.02
    lengths.learn(text(1000), 1000)
    assert lengths.error_ratio == pytest.approx(0.05 * 0.5, abs=0.02)
    other = PromptLengths()
    other.recall(lengths.remember())
    assert other.error_ratio == lengths.error_ratio
