"""A prompt as token ids: what the worker compares, counts and hands over. Text is only ever turned into tokens by llama.cpp."""

import hashlib

import msgspec

from twinpool.errors import BadRequestError, Reason
from twinpool.worker.asked import Asked
from twinpool.worker.engine import TOKEN_BYTES, Engine, packed


class Prompt(msgspec.Struct, frozen=True):
    tokens: bytes  # packed

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def kv(self) -> bytes:
        """What prefill computes: all but the last token, but not nothing."""
        return self.tokens[:-TOKEN_BYTES] or self.tokens

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.tokens).hexdigest()


async def read_prompts(engine: Engine, asked: Asked) -> list[Prompt]:
    """Raises `BadRequestError` for one that does not fit with what may follow it."""
    if asked.endpoint == "chat":
        text = await engine.chat_prompt(asked.rest)
        found = [Prompt(await engine.tokenize(text))]
    else:
        found = [
            Prompt(await engine.tokenize(prompt) if isinstance(prompt, str) else packed(list(prompt)))
            for prompt in asked.prompts
        ]
    context = engine.facts.context_tokens
    for prompt in found:
        if not prompt.count:
            raise BadRequestError("the prompt is empty", Reason.INVALID_VALUE)
        if prompt.count + (asked.max_tokens or 1) > context:
            raise BadRequestError(
                f"this model's context is {context} tokens; the prompt has {prompt.count}"
                + (f", and {asked.max_tokens} more were asked for" if asked.max_tokens else ""),
                Reason.CONTEXT_LENGTH,
                param="messages" if asked.endpoint == "chat" else "prompt",
            )
    return found
