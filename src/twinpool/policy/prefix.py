"""Which worker holds which beginnings of prompts, as far as one can tell from what it was given to read.

A beginning is named by its last block's number, which stands for all of the text up to there (`RequestFacts.prefix`). An engine
drops what it needs room for and tells nobody, so this is a guess, bounded and oldest first out; a wrong one costs one prompt's
forecast."""

from collections import OrderedDict

from twinpool.core.model import PREFIX_BLOCK_TOKENS

_BLOCKS_KEPT = 8192  # a worker: 4 million tokens of prompts, more than an engine has room for
_BLOCKS_READ = 64  # of one prompt: 32,000 tokens that are shared are as good as all


class Prefixes:
    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, None]] = {}

    def holds(self, worker: str, prefix: tuple[int, ...]) -> None:
        held = self._held.setdefault(worker, OrderedDict())
        for block in prefix[:_BLOCKS_READ]:
            held[block] = None
            held.move_to_end(block)
        while len(held) > _BLOCKS_KEPT:
            held.popitem(last=False)

    def cached_tokens(self, worker: str, prefix: tuple[int, ...], prompt_tokens: int) -> int:
        """Tokens of the prompt that the worker need not read; its last one always is."""
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

    def remember(self) -> dict[str, list[int]]:
        return {worker: list(held) for worker, held in self._held.items()}

    def recall(self, record: dict[str, list[int]]) -> None:
        self._held = {worker: OrderedDict.fromkeys(held) for worker, held in record.items()}
