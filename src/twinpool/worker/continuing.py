"""Going on with an answer that another engine began and the client has part of.

    prompt ──► write again: the sent text comes out again and is dropped ──► the rest goes out
                    └─ it comes out otherwise, or cannot be relied on to come out again
                          └──► replay: the sent text's tokens are put in one at a time ──► the rest goes out

At temperature 0, or with a seed, an engine writes the same answer again: token by token as before, so that its arithmetic
rounds as before, and the text goes on exactly as it would have. Else the sent text is tokenised and put in, one token a step
(in one batch it would round otherwise, and the rest be another text three times out of four). A tokeniser may cut a text
otherwise than it was written; then the rest is a good continuation, not the very same.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from twinpool.errors import BadRequestError, Reason
from twinpool.worker.asked import Asked
from twinpool.worker.engine import Engine, packed, unpacked
from twinpool.worker.prompt import Prompt


class OtherwiseError(Exception):
    """The answer does not come out again as it was sent."""


def writes_again(asked: Asked) -> bool:
    """Whether this request's answer can be relied on to come out the same."""
    return asked.rest.get("temperature") == 0 or asked.seed is not None


async def skip_sent(events: AsyncIterator[bytes], sent: str) -> AsyncIterator[bytes]:
    """The events behind the sent text; raises `OtherwiseError` where they do not begin with it."""
    async for event in events:
        if not sent:
            yield event
            continue
        chunk = _chunk(event)
        text = _text(chunk)
        if sent.startswith(text) and not _is_last(chunk):
            sent = sent[len(text) :]
        elif text.startswith(sent):
            yield _with_text(chunk, text[len(sent) :])
            sent = ""
        else:
            raise OtherwiseError


async def replay(engine: Engine, slot: int, prompt: Prompt, sent: str) -> list[int]:
    """Puts the sent text into the slot behind the prompt, all but its last token; gives all its tokens."""
    tokens = unpacked(await engine.tokenize(sent, is_prompt=False))
    held = unpacked(prompt.tokens)
    for end in range(len(tokens)):
        await engine.prefill(slot, packed(held + tokens[:end]), keep=True)
    return tokens


def body_behind(body: dict[str, Any], prompt: Prompt, tokens: list[int]) -> dict[str, Any]:
    """What llama.cpp is asked for the rest of an answer whose beginning is `tokens`: a completion, whatever the route."""
    if any(body.get(name) for name in ("grammar", "json_schema", "response_format")):
        raise BadRequestError("an answer with a grammar cannot be gone on with", Reason.UNSUPPORTED)
    left = body["max_tokens"] - len(tokens)
    if left < 1:
        raise BadRequestError("nothing is left to write", Reason.UNSUPPORTED)
    kept = {name: value for name, value in body.items() if name not in ("messages", "tools")}
    return {**kept, "prompt": unpacked(prompt.tokens) + tokens, "max_tokens": left}


def as_first(event: bytes, asked: Asked, replayed: int) -> bytes:
    """An event of the rest in the shape of the route that was asked, its usage that of the whole answer."""
    if event == b"data: [DONE]":
        return event
    chunk = _chunk(event)
    if chunk.get("usage"):
        chunk["usage"]["completion_tokens"] += replayed
    if asked.endpoint == "chat":
        chunk["object"] = "chat.completion.chunk"
        for choice in chunk["choices"]:
            text = choice.pop("text")
            choice["delta"] = {"content": text} if text else {}
    return b"data: " + msgspec.json.encode(chunk)


def _chunk(event: bytes) -> dict[str, Any]:
    if event == b"data: [DONE]":
        raise OtherwiseError
    chunk: dict[str, Any] = msgspec.json.decode(event[6:])
    return chunk


def _is_last(chunk: dict[str, Any]) -> bool:
    return not chunk["choices"] or chunk["choices"][0].get("finish_reason") is not None


def _text(chunk: dict[str, Any]) -> str:
    if not chunk["choices"]:
        return ""
    choice = chunk["choices"][0]
    return (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""


def _with_text(chunk: dict[str, Any], text: str) -> bytes:
    choice = chunk["choices"][0]
    if "delta" in choice:
        choice["delta"]["content"] = text
    else:
        choice["text"] = text
    return b"data: " + msgspec.json.encode(chunk)
