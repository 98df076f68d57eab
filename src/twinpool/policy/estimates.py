"""Guesses, fitted online from what the engines tell. So far one: how many tokens a prompt of so many characters has."""

from collections.abc import Mapping

from twinpool.core.model import RequestFacts

_TOKENS_PER_CHAR = {True: 0.25, False: 0.6}
"""Where the fit starts, for ASCII prompts and for others: English runs near four characters a token, other scripts near two."""

_NAMES = {True: "ascii_tokens_per_char", False: "other_tokens_per_char"}

_LEARNING_RATE = 0.05  # the mean of about the last 40 prompts of the kind


class PromptLengths:
    """Characters times a ratio, learnt for ASCII prompts and for others apart (a mean over both fits neither). `error_ratio`:
    the mean relative error of recent guesses."""

    def __init__(self, learnt: Mapping[str, float] | None = None) -> None:
        """`learnt` by another one, as far as it has."""
        known = learnt or {}
        self._ratio = {is_ascii: known.get(_NAMES[is_ascii], ratio) for is_ascii, ratio in _TOKENS_PER_CHAR.items()}
        self.error_ratio = known.get("error_ratio", 0.0)

    def tokens(self, facts: RequestFacts) -> int:
        """The guess, at least 1."""
        return max(1, round(facts.prompt_chars * self._ratio[facts.is_ascii]))

    def learn(self, facts: RequestFacts, prompt_tokens: int) -> None:
        """An engine counted `prompt_tokens` for this prompt. Short ones say little: most of their tokens are the template's."""
        if facts.prompt_chars < 200:
            return
        ratio = self._ratio[facts.is_ascii]
        if prompt_tokens > 0:
            error = min(1.0, abs(ratio * facts.prompt_chars - prompt_tokens) / prompt_tokens)
            self.error_ratio += _LEARNING_RATE * (error - self.error_ratio)
        self._ratio[facts.is_ascii] = ratio + _LEARNING_RATE * (prompt_tokens / facts.prompt_chars - ratio)

    def remember(self) -> dict[str, float]:
        return {name: self._ratio[is_ascii] for is_ascii, name in _NAMES.items()} | {"error_ratio": self.error_ratio}

    def recall(self, learnt: Mapping[str, float]) -> None:
        self._ratio = {is_ascii: learnt[name] for is_ascii, name in _NAMES.items()}
        self.error_ratio = learnt["error_ratio"]
