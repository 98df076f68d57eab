"""Prompts of a wanted length that no cache has seen.

    nonce · filler                     fresh words first, so that engines find no prefix of it in their caches
    block · block · … · nonce · filler   from a trace that tells what is shared: equal ids are equal text, within this run

A length is words times a rate plus what the service adds (its template), both measured against the engine's own count.
"""

import secrets
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from random import Random

from twinpool.workload.offered import BLOCK_TOKENS, Offered

_WORDS = [
    "river",
    "stone",
    "light",
    "winter",
    "paper",
    "garden",
    "window",
    "music",
    "road",
    "house",
    "water",
    "green",
    "small",
    "happy",
    "number",
    "letter",
    "morning",
    "summer",
    "table",
    "school",
    "story",
    "money",
    "family",
    "market",
    "father",
    "mother",
    "city",
    "country",
    "world",
    "people",
    "street",
    "party",
    "power",
    "night",
    "state",
    "group",
    "point",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "child",
    "problem",
    "hand",
    "part",
    "area",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "service",
    "friend",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
]

NONCE_WORDS = 8
"""Of some eighty words: fifty bits."""

CYCLE_WORDS = len(_WORDS)
"""In any stretch of filler that is so long each word comes once: its tokens a word are those of all filler."""

_FILLER_WORDS = 200_000
"""Then it begins again."""


class Prompts:
    """Makes the prompts of one run. Their words are drawn anew: two runs of one seed share their lengths and not a prompt."""

    def __init__(self, *, base_tokens: float = 0.0, tokens_per_word: float = 1.0, length_divisor: float = 1.0) -> None:
        self._rng = Random(secrets.randbits(128))  # noqa: S311  # told apart, not kept secret
        self.base_tokens = base_tokens
        self.tokens_per_word = tokens_per_word
        self._block_words = max(1, round(BLOCK_TOKENS / length_divisor / tokens_per_word))
        self._block = lru_cache(maxsize=4096)(self._new_block)
        self._run = self._rng.getrandbits(64)

    @property
    def fewest_tokens(self) -> int:
        """The shortest prompt there can be."""
        return round(self.base_tokens + self.tokens_per_word)

    def text(self, request: Offered) -> str:
        """For that request; of one word at least."""
        words = max(1, round((request.prompt_tokens - self.base_tokens) / self.tokens_per_word))
        blocks = request.prefix[: words // self._block_words]
        front = [self._block(block) for block in blocks]
        rest = words - len(blocks) * self._block_words
        return " ".join([*front, self.of_words(rest)]) if rest else " ".join(front)

    def of_words(self, words: int) -> str:
        """A fresh text of so many words."""
        return with_nonce(self.nonce(min(words, NONCE_WORDS)), words)

    def nonce(self, words: int = NONCE_WORDS) -> str:
        return " ".join(self._rng.choices(_WORDS, k=words))

    def _new_block(self, block: int) -> str:
        rng = Random(self._run * 1_000_003 + block)  # noqa: S311
        return " ".join(_cycles(rng, self._block_words)[: self._block_words])


def with_nonce(nonce: str, words: int) -> str:
    """A text of so many words, of which the nonce is the first."""
    return f"{nonce} {_filler(words - NONCE_WORDS)}" if words > NONCE_WORDS else nonce


def fit(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(base tokens, tokens a word) from measured (words, tokens): the line through the shortest and the longest,
    which rises."""
    (few, few_tokens), (many, many_tokens) = min(counts), max(counts)
    rate = (many_tokens - few_tokens) / (many - few)
    return few_tokens - rate * few, rate


def _cycles(rng: Random, words: int) -> list[str]:
    """So many words or a few more, each as often as the others, so that any stretch has the mean rate of tokens."""
    found: list[str] = []
    while len(found) < words:
        found += rng.sample(_WORDS, CYCLE_WORDS)
    return found


@lru_cache(maxsize=1)
def _long_filler() -> tuple[str, list[int]]:
    """All the filler there is, and where each of its words ends."""
    rng = Random(0)  # noqa: S311
    words = _cycles(rng, _FILLER_WORDS)
    return " ".join(words), list(accumulate(len(word) + 1 for word in words))


def _filler(words: int) -> str:
    text, ends = _long_filler()
    whole, rest = divmod(words, len(ends))
    return " ".join([text] * whole + [text[: ends[rest - 1] - 1]] * bool(rest))
