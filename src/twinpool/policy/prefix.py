"""Which worker holds which beginnings of prompts, as far as one can tell from what it was given to read.

A beginning is named by its last block's number, which stands for all of the text up to there (`RequestFacts.prefix`). An engine
drops what it needs room for and tells nobody, so this is a guess, bounded and oldest first out; a wrong one costs one prompt's
forecast."""

from collections import OrderedDict

from twinpool.core.model import PREFIX_BLOCK_TOKENS

_BLOCKS_KEPT = 8192  # of a worker whose room nobody tells: 4 million tokens of prompts
_BLOCKS_READ = 64  # of one prompt: 32,000 tokens that are shared are as good as all


class Prefixes:
    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, None]] = {}

    def holds(self, worker: str, prefix: tuple[int, ...], room_tokens: float | None = None) -> None:
        """It has read this, and has room for so many tokens beside what runs there; None where that is not known."""
        most = _BLOCKS_KEPT if room_tokens is None else min(_BLOCKS_KEPT, max(0, int(room_tokens // PREFIX_BLOCK_TOKENS)))
        held = self._held.setdefault(worker, OrderedDict())
        for block in prefix[:_BLOCKS_READ]:
            held[block] = None
            held.move_to_end(block)
        while len(held) > most:
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
