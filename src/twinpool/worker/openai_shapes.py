"""llama.cpp's streamed events, mended into what OpenAI's clients expect.

Most events of a plain stream pass as they are: a search for two words tells that nothing is to be mended. Pure: bytes
and dictionaries.

llama.cpp's events always come streamed and with usage asked for (see `engine`), so:
- usage is taken out, and given at the end by whoever adds up the choices: in a chunk of its own if the client asked,
  else not at all;
- ``timings`` is taken out unless asked for;
- log-probabilities of /v1/completions come in chat's shape and leave in their own.
"""

import secrets
from typing import Any

import msgspec

from twinpool.worker.asked import Asked

_PREFIX = {"chat": "chatcmpl-", "completions": "cmpl-"}
_CHUNK = {"chat": "chat.completion.chunk", "completions": "text_completion"}
_WHOLE = {"chat": "chat.completion", "completions": "text_completion"}
_KEPT = ("id", "created", "model", "system_fingerprint")
DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole request: each prompt once, every choice's completion."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def written(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Finished(msgspec.Struct, frozen=True):
    """What llama.cpp said of one choice at its end."""

    completion_tokens: int
    computed_prompt_tokens: int


class ChoiceEvents:
    """One choice's events, mended one by one."""

    def __init__(self, asked: Asked, index: int, shared_id: str | None = None) -> None:
        self.finished: Finished | None = None
        self.kept: dict[str, Any] = {}
        self._asked = asked
        self._index = index
        self._id = shared_id
        self._chat = asked.endpoint == "chat"
        self._text_chars = 0
        self._every = shared_id is not None or (asked.logprobs is not None and (not self._chat or asked.logprobs == 0))

    def mend(self, event: bytes) -> bytes | None:
        """The event as the client gets it, its blank line included; None if it is not for the client."""
        if not self._every and b'"timings"' not in event and b'"usage"' not in event:
            if event == b"data: [DONE]":
                return None
            if not self._chat:
                event = event.replace(b'"id":"chatcmpl-', b'"id":"cmpl-', 1)
            return event + b"\n\n"
        parsed = self.parse(event)
        return None if parsed is None else b"data: " + msgspec.json.encode(parsed) + b"\n\n"

    def parse(self, event: bytes) -> dict[str, Any] | None:
        """The mended event as a dictionary; None if it has no choice in it."""
        if event == b"data: [DONE]":
            return None
        chunk: dict[str, Any] = msgspec.json.decode(event[6:])
        usage, timings = chunk.pop("usage", None), chunk.get("timings")
        if not self._asked.timings:
            chunk.pop("timings", None)
        if usage is not None and timings is not None:
            self.finished = Finished(usage["completion_tokens"], timings["prompt_n"])
        chunk["id"] = self._id or _PREFIX[self._asked.endpoint] + chunk["id"].removeprefix("chatcmpl-")
        self.kept = {key: chunk[key] for key in _KEPT if key in chunk}
        if not chunk["choices"]:
            return None
        choice = chunk["choices"][0]
        choice["index"] = self._index
        if choice.get("logprobs"):
            self._mend_logprobs(choice)
        self._text_chars += len(choice.get("text", ""))
        return chunk

    def _mend_logprobs(self, choice: dict[str, Any]) -> None:
        entries = choice["logprobs"]["content"]
        if not self._chat:
            choice["logprobs"] = legacy_logprobs(entries, self._asked.logprobs or 0, self._text_chars)
        elif not self._asked.logprobs:
            for entry in entries:
                entry["top_logprobs"] = []  # llama.cpp gives at least one; nobody asked for any


def legacy_logprobs(entries: list[dict[str, Any]], top: int, offset: int) -> dict[str, Any]:
    """Chat's list of tokens as /v1/completions' four lists. `offset`: characters of this choice's text before these
    tokens."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [_alternatives(entry, top) for entry in entries] if top else None,
        "text_offset": offsets,
    }


def _alternatives(entry: dict[str, Any], top: int) -> dict[str, float]:
    """The `top` likeliest, and the token that was taken where it is not among them."""
    best = {other["token"]: other["logprob"] for other in entry["top_logprobs"][:top]}
    best.setdefault(entry["token"], entry["logprob"])
    return best


class WholeChoice:
    """Adds one choice's events up to what an answer that is not streamed has."""

    def __init__(self, asked: Asked, index: int) -> None:
        self.events = ChoiceEvents(asked, index)
        self.timings: Any = None
        self._chat = asked.endpoint == "chat"
        self._texts: dict[str, list[str]] = {}
        self._tools: dict[int, dict[str, Any]] = {}
        self._other: dict[str, Any] = {}
        self._logprobs: dict[str, list[Any] | None] | None = None
        self._finish: str | None = None
        self._index = index

    def add(self, event: bytes) -> None:
        chunk = self.events.parse(event)
        if chunk is None:
            return
        self.timings = chunk.get("timings", self.timings)
        choice = chunk["choices"][0]
        self._finish = choice.get("finish_reason") or self._finish
        if choice.get("logprobs"):
            self._add_logprobs(choice["logprobs"])
        if not self._chat:
            self._texts.setdefault("text", []).append(choice["text"])
            return
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                self._add_tools(value)
            elif isinstance(value, str) and name != "role":
                self._texts.setdefault(name, []).append(value)
            elif name != "content":
                self._other[name] = value

    def whole(self) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        if not self._chat:
            return {
                "text": texts.get("text", ""),
                "index": self._index,
                "logprobs": self._logprobs,
                "finish_reason": self._finish,
            }
        message: dict[str, Any] = {"role": "assistant", "content": None if self._tools else "", **self._other, **texts}
        if self._tools:
            message["tool_calls"] = [self._tools[index] for index in sorted(self._tools)]
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs,
            "finish_reason": self._finish,
        }

    def _add_logprobs(self, logprobs: dict[str, Any]) -> None:
        if self._logprobs is None:
            self._logprobs = {name: list(values) if values is not None else None for name, values in logprobs.items()}
            return
        for name, values in logprobs.items():
            known = self._logprobs.get(name)
            if known is not None and values is not None:
                known.extend(values)

    def _add_tools(self, deltas: list[dict[str, Any]]) -> None:
        for delta in deltas:
            call = self._tools.setdefault(delta["index"], {"function": {"name": "", "arguments": ""}})
            call.update({key: value for key, value in delta.items() if key not in ("index", "function")})
            for key, value in delta.get("function", {}).items():
                call["function"][key] = call["function"].get(key, "") + value


def new_id(asked: Asked) -> str:
    return _PREFIX[asked.endpoint] + secrets.token_urlsafe(24)


def whole_answer(asked: Asked, kept: dict[str, Any], choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {**kept, "object": _WHOLE[asked.endpoint], "choices": choices, "usage": usage.written()}


def usage_event(asked: Asked, kept: dict[str, Any], usage: Usage) -> bytes:
    """The last chunk of a stream whose client asked for usage."""
    chunk = {**kept, "object": _CHUNK[asked.endpoint], "choices": [], "usage": usage.written()}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def prefill_answer(asked: Asked, model: str, created: int, usage: Usage, transfer: dict[str, Any]) -> dict[str, Any]:
    """The answer to a prefill leg: its one token is nobody's to read, the decode worker computes it again."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length"}
    choice |= {"message": {"role": "assistant", "content": ""}} if asked.endpoint == "chat" else {"text": ""}
    kept = {"id": new_id(asked), "created": created, "model": model}
    return {**whole_answer(asked, kept, [choice], usage), "kv_transfer_params": transfer}
