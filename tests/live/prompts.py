"""Prompts of a given length whose text nobody has sent before: nothing of them can lie in any cache.

Every word below is one token of the default model when a space precedes it. The seed stands in the prompt, so that a failure
can be repeated.
"""

import random
import secrets
from typing import Any

_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment air
teacher force education
"""
WORDS = _COMMON.split()

Body = dict[str, Any]


def text(tokens: int) -> str:
    """About that many tokens (a dozen more for the seed)."""
    seed = secrets.token_hex(4)
    chosen = random.Random(seed).choices(WORDS, k=tokens)
    return f"Note {seed}: {' '.join(chosen)}"


def tokens(count: int) -> list[int]:
    """Exactly that many tokens of a vocabulary's plain middle, for `completions`."""
    chosen = random.Random(secrets.token_hex(4))
    return [chosen.randrange(1000, 20000) for _ in range(count)]


def body(path: str, tokens: int, **fields: Any) -> Body:
    """A request to `path` (``chat/completions`` or ``completions``), greedy, whose prompt has about that many tokens."""
    common = {"temperature": 0, **fields}
    if path == "completions":
        return {"prompt": text(tokens), **common}
    # the template's own words and the seed come on top
    messages = [{"role": "system", "content": "Go on."}, {"role": "user", "content": text(max(tokens - 20, 1))}]
    return {"messages": messages, **common}


def going_on_for_ever() -> Body:
    """A field of llama.cpp's: only the limit ends the answer."""
    return {"ignore_eos": True}
