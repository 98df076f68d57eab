"""Which worker holds which beginnings of prompts, as far as one can tell from what it was given to read.

A beginning is named by its last block's number, which stands for all of the text up to there (`RequestFacts.prefix`). An engine
drops what it needs room for and tells nobody, so this is a guess, bounded and oldest first out; a wrong one costs one prompt's
forecast. Where an engine tells how much it had in its cache, the guess is cut to the share of it that came true lately: one
that caches nothing is soon thought to hold nothing."""

from collections import OrderedDict

import msgspec

from twinpool.core.model import PREFIX_BLOCK_TOKENS

_BLOCKS_KEPT = 8192  # of a worker whose room nobody tells: 4 million tokens of prompts
_BLOCKS_READ = 64  # of one prompt: 32,000 tokens that are shared are as good as all
_TOLD_RATE = 0.1  # the mean of about the last ten guesses


class PrefixesRecord(msgspec.Struct):
    held: dict[str, list[int]]
    came_true: dict[str, float]


class Prefixes:
    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, None]] = {}
        self._came_true: dict[str, float] = {}  # by worker: the share of what it was thought to hold that it did

    def holds(self, worker: str, prefix: tuple[int, ...], room_tokens: float | None = None) -> None:
        """It has read this, and has room for so many tokens beside what runs there; None where that is not known."""
        most = _BLOCKS_KEPT if room_tokens is None else min(_BLOCKS_KEPT, max(0, int(room_tokens // PREFIX_BLOCK_TOKENS)))
        held = self._held.setdefault(worker, OrderedDict())
        for block in prefix[:_BLOCKS_READ]:
            held[block] = None
            held.move_to_end(block)
        while len(held) > most:
            held.popitem(last=False)

    def told(self, worker: str, held_tokens: int, cached_tokens: int) -> None:
        """Of `held_tokens` that it should have held it had so many."""
        if held_tokens > 0 and worker in self._held:  # else it is gone, or another engine by now
            share = self._came_true.get(worker, 1.0)
            self._came_true[worker] = share + _TOLD_RATE * (min(1.0, cached_tokens / held_tokens) - share)

    def cached_tokens(self, worker: str, prefix: tuple[int, ...], prompt_tokens: int) -> int:
        """Tokens of the prompt that the worker need not read; its last one always is."""
        return int(self._came_true.get(worker, 1.0) * self.held_tokens(worker, prefix, prompt_tokens))

    def held_tokens(self, worker: str, prefix: tuple[int, ...], prompt_tokens: int) -> int:
        """The same by what it was given to read alone, whatever came of such guesses."""
        held = self._held.get(worker)
        if not held:
            return 0
        blocks = 0
        for block in prefix[:_BLOCKS_READ]:
            if block not in held:
                break
            blocks += 1
        return max(0, min(blocks * PREFIX_BLOCK_TOKENS, prompt_tokens - 1))

    def forget(self, worker: str) -> None:
        self._held.pop(worker, None)
        self._came_true.pop(worker, None)

    def remember(self) -> PrefixesRecord:
        return PrefixesRecord({worker: list(held) for worker, held in self._held.items()}, self._came_true)

    def recall(self, record: PrefixesRecord) -> None:
        self._held = {worker: OrderedDict.fromkeys(held) for worker, held in record.held.items()}
        self._came_true = record.came_true
