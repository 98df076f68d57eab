"""What the gateway reads from an OpenAI request: what routing needs, and nothing else.

Whether a role, a tool or a sampling parameter is valid is the engine's to say: a router that is stricter than its engines is
wrong about half of them within a year.
"""

from enum import StrEnum
from typing import TypeVar

import msgspec

from twinpool.core.decisions import Why
from twinpool.core.model import RequestFacts
from twinpool.errors import BadRequestError, Reason
from twinpool.handoff.body import Fields, take_apart


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


T = TypeVar("T")

ROUTES: dict[str, Endpoint] = {"/v1/chat/completions": Endpoint.CHAT, "/v1/completions": Endpoint.COMPLETIONS}
PATHS = {endpoint: path for path, endpoint in ROUTES.items()}


class Call(msgspec.Struct, frozen=True):
    """One request as it came, taken apart, with what routing needs to know of it."""

    endpoint: Endpoint
    fields: Fields
    facts: RequestFacts
    can_continue: bool
    """Whether another engine could go on with a stream of this: the text of one choice and nothing else."""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct):
    text: str = ""


_BEYOND_TEXT = ("tools", "functions", "logprobs", "top_logprobs", "echo")
"""Fields that put more than text into an answer."""

_MESSAGES = msgspec.json.Decoder(list[_Message])
_PARTS = msgspec.json.Decoder(list[_Part])
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_INTEGER = msgspec.json.Decoder(int)


def read_call(endpoint: Endpoint, body: bytes) -> Call:
    """Take a body apart; raises `BadRequestError` where it is not a JSON object that names a model."""
    fields = take_apart(body)
    model = _model(fields)
    texts, prompts = _prompt(endpoint, fields)
    choices = max(_integer(fields, "n") or 1, _integer(fields, "best_of") or 1)
    obstacle = Why.PROMPT_LIST if prompts is not None else Why.N_CHOICES if choices > 1 else None
    facts = RequestFacts(
        model=model,
        endpoint=endpoint,
        stream=bytes(fields.get("stream", b"")) == b"true",
        prompt_chars=sum(map(len, texts)),
        is_ascii=all(map(str.isascii, texts)),
        sequences=max(1, choices * (prompts or 1)),
        max_tokens=_integer(fields, "max_completion_tokens") or _integer(fields, "max_tokens"),
        obstacle=obstacle,
    )
    return Call(endpoint, fields, facts, _can_continue(fields, facts))


def _can_continue(fields: Fields, facts: RequestFacts) -> bool:
    if not facts.stream or facts.obstacle is not None:
        return False
    return all(bytes(fields.get(name, b"null")) in (b"null", b"false", b"[]") for name in _BEYOND_TEXT)


def _model(fields: Fields) -> str:
    if "model" not in fields:
        raise BadRequestError("you must provide a model parameter", Reason.MISSING_FIELD, param="model")
    model = _decode(_TEXT, fields["model"])
    if not model:
        raise BadRequestError("model must be a non-empty string", Reason.INVALID_VALUE, param="model")
    return model


def _prompt(endpoint: Endpoint, fields: Fields) -> tuple[list[str], int | None]:
    """The texts whose lengths make the estimate, and how many prompts there are where they stand in a list."""
    if endpoint is Endpoint.CHAT:
        messages = _decode(_MESSAGES, fields.get("messages", msgspec.Raw(b"null"))) or []
        return [text for message in messages for text in _content(message.content)], None
    prompt = fields.get("prompt", msgspec.Raw(b"null"))
    if not bytes(prompt).startswith(b"["):
        return [_decode(_TEXT, prompt) or ""], None
    texts = _decode(_TEXTS, prompt)
    if texts is not None:
        return texts, len(texts)
    if bytes(prompt)[1:].lstrip().startswith(b"["):  # a list of prompts in tokens
        return [], bytes(prompt).count(b"[") - 1
    return ["aaaa"] * bytes(prompt).count(b","), None  # one prompt in tokens: as long as four letters each


def _content(content: msgspec.Raw) -> list[str]:
    text = _decode(_TEXT, content)
    if text is not None:
        return [text]
    return [part.text for part in _decode(_PARTS, content) or []]


def _integer(fields: Fields, name: str) -> int | None:
    """The field's value where it is a whole number; what else it may be is the engine's to refuse."""
    return _decode(_INTEGER, fields[name]) if name in fields else None


def _decode(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw) -> T | None:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
