"""The prompts' beginnings that an engine still holds, block by block, the least recently used out first.

A request names its blocks by ids that stand for all the text up to there (`workload.offered.Offered.prefix`). Cached blocks
lie in the KV that nothing else uses, and give way to whatever does. Simpler than an engine's: a block in use counts with its
sequence and may be dropped from here meanwhile."""

from collections import OrderedDict

from twinpool.workload.offered import BLOCK_TOKENS


class PrefixCache:
    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit_tokens(self, prefix: tuple[int, ...], prompt_tokens: int) -> int:
        """Tokens of the prompt that need not be read. The last one always is: its output is the first token."""
        blocks, hits = self._blocks, 0
        for block in prefix:
            if block not in blocks:
                break
            blocks.move_to_end(block)
            hits += 1
        return min(hits * BLOCK_TOKENS, prompt_tokens - 1)

    def add(self, prefix: tuple[int, ...], room_tokens: int) -> None:
        """The prompt is read; what then exceeds the room goes."""
        for block in prefix:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self.shrink(room_tokens)

    def shrink(self, room_tokens: int) -> None:
        room = max(0, room_tokens // BLOCK_TOKENS)
        while len(self._blocks) > room:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    def __len__(self) -> int:
        return len(self._blocks)
