"""Names for the beginnings of prompts, by which routing knows who has read one before (`RequestFacts.prefix`).

    text   |<- 2,048 bytes ->|<- 2,048 bytes ->|<- ... a last block that is not full has no name
    names          n1                n2             each stands for all of the text up to there

No tokenizer: a block is about `PREFIX_BLOCK_TOKENS` of English. Model or adapter, tenant, the client's own `cache_salt` and its
tools are part of each name. They are digests under a secret that ends with this process, so that nobody can try prompts against
a journal.
"""

import hashlib
import secrets
from collections.abc import Iterable

from twinpool.core.model import PREFIX_BLOCK_TOKENS
from twinpool.handoff.body import Fields

_BLOCK_BYTES = 4 * PREFIX_BLOCK_TOKENS
_MOST_BLOCKS = 64  # 32,000 tokens that are shared are as good as all
_NAME_BYTES = 6
_SEEDS = ("cache_salt", "tools", "functions")


class Beginnings:
    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def name(self, model: str, tenant: str, fields: Fields, texts: Iterable[str]) -> tuple[int, ...]:
        """For a prompt of these texts, one after the other."""
        text = "\0".join(texts)[: _MOST_BLOCKS * _BLOCK_BYTES].encode("utf-8")
        blocks = min(len(text) // _BLOCK_BYTES, _MOST_BLOCKS)
        if not blocks:
            return ()
        digest = hashlib.blake2b(key=self._secret, digest_size=_NAME_BYTES)
        seeds = [model.encode("utf-8"), tenant.encode(), *(bytes(fields.get(name, b"")) for name in _SEEDS)]
        for seed in seeds:
            digest.update(b"%d:%b" % (len(seed), seed))
        names = []
        for block in range(blocks):
            digest.update(text[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES])
            names.append(int.from_bytes(digest.copy().digest(), "big"))
        return tuple(names)
