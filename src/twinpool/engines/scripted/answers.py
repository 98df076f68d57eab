"""Which words, and how they look on the wire.

The words depend on the prompt alone: to `… n17` the answer is `n17.0#<checksum> n17.1 n17.2 …`, and the second choice's is
`n17/1.0#…`. A prompt that ends in the beginning of its own answer is gone on with, as a model would: that is how a broken
stream is continued.
"""

import re
from dataclasses import dataclass
from typing import Any, Self
from zlib import crc32

GARBAGE = "GARBAGE"
"""The word that an engine says when it reads KV that is not what its request is about."""

_SAID = re.compile(r"(?P<tail>.+)\.(?P<index>\d+)(#[0-9a-f]{8})?")


@dataclass(frozen=True, slots=True)
class Text:
    """One choice's answer, token by token; joined, they are the text."""

    tokens: tuple[str, ...]
    finish_reason: str
    shown_tokens: int  # fewer than `tokens` when a stop string cut the last ones

    @classmethod
    def of(
        cls, prompt: str, choice: int, count: int, finish_reason: str, stops: tuple[str, ...], *, leads_with_space: bool
    ) -> Self:
        words = _words(prompt, choice, count)
        tokens = [word if index == 0 and not leads_with_space else " " + word for index, word in enumerate(words)]
        text = ""
        for index, token in enumerate(tokens):
            text += token
            cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
            if cuts:
                return cls(_cut(tokens[: index + 1], min(cuts)), "stop", index + 1)
        return cls(tuple(tokens), finish_reason, len(tokens))


def answer_text(prompt: str, tokens: int = 16, *, choice: int = 0, is_chat: bool = True) -> str:
    """What the engine says to that (rendered) prompt, for a test to compare with."""
    return "".join(Text.of(prompt, choice, tokens, "", (), leads_with_space=not is_chat).tokens)


def chat_prompt(messages: list[Any], *, continues: bool = False) -> str:
    """The template: `role: text` in lines. `continues`: the last message is the beginning of the answer."""
    lines = [f"{message.get('role')}: {_content(message.get('content'))}" for message in messages]
    if continues:
        return "\n".join([*lines[:-1], _content(messages[-1].get("content"))])
    return "\n".join(lines)


def natural_start(prompt: str) -> int:
    """How many words of its own answer a prompt ends in."""
    return _split(prompt)[1]


def prompt_tokens(prompt: str) -> int:
    return len(prompt.split())


def _words(prompt: str, choice: int, count: int) -> list[str]:
    base, start = _split(prompt)
    return _from_start(base, choice, start + count)[start:]


def _from_start(base: list[str], choice: int, count: int) -> list[str]:
    tail = (base[-1] if base else "nothing") + (f"/{choice}" if choice else "")
    checksum = crc32(" ".join(base).encode("utf-8", "surrogatepass"))
    return [f"{tail}.{index}" + (f"#{checksum:08x}" if index == 0 else "") for index in range(count)]


def _split(prompt: str) -> tuple[list[str], int]:
    """The prompt proper, and how much of its answer follows it."""
    words = prompt.split()
    match = _SAID.fullmatch(words[-1]) if words else None
    if match is None or len(match["index"]) > 6:
        return words, 0
    said = int(match["index"]) + 1
    base = words[:-said]
    if base and words[-said:] == _from_start(base, 0, said):
        return base, said
    return words, 0


def _cut(tokens: list[str], length: int) -> tuple[str, ...]:
    kept = []
    for token in tokens:
        kept.append(token[:length])
        length -= len(kept[-1])
    return tuple(kept)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(part.get("text", f"<{part.get('type')}>") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


# The wire


def logprob(index: int, token: str) -> float:
    """The same from every engine that has read the same prompt; another for garbage, as a model's would be."""
    return -0.01 * (1 + index % 7) - (5.0 if GARBAGE in token else 0.0)


def chat_logprobs(tokens: list[tuple[int, str]], top: int) -> dict[str, Any]:
    def one(index: int, token: str, rank: int) -> dict[str, Any]:
        text = token if rank == 0 else f"{token}?{rank}"
        return {"token": text, "logprob": logprob(index, token) - rank, "bytes": list(text.encode())}

    return {
        "content": [
            one(index, token, 0) | {"top_logprobs": [one(index, token, rank) for rank in range(top)]} for index, token in tokens
        ]
    }


def text_logprobs(tokens: list[tuple[int, str]], top: int, offset: int) -> dict[str, Any]:
    offsets = []
    for _, token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": [token for _, token in tokens],
        "token_logprobs": [logprob(index, token) for index, token in tokens],
        "top_logprobs": [
            {(token if rank == 0 else f"{token}?{rank}"): logprob(index, token) - rank for rank in range(max(top, 1))}
            for index, token in tokens
        ],
        "text_offset": offsets,
    }
