"""What the gateway reads from an OpenAI request: what routing needs, and nothing else.

Whether a role, a tool or a sampling parameter is valid is the engine's to say: a router that is stricter than its engines is
wrong about half of them within a year. What an engine could not hand over (an obstacle) is read the other way round: engines
take "3" and 3.0 for 3, so that whatever is not plainly harmless goes whole to one worker.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from twinpool.core.decisions import Why
from twinpool.core.model import RequestFacts
from twinpool.errors import BadRequestError, Reason
from twinpool.gateway.beginnings import Beginnings
from twinpool.gateway.routes import PATHS, ROUTES, WAYS, Endpoint, Way
from twinpool.gateway.senders import Sender
from twinpool.handoff.body import Fields, take_apart

__all__ = ["PATHS", "ROUTES", "Call", "Endpoint", "read_call"]

T = TypeVar("T")


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

_READ_BY_MODEL = ("input", "messages", "query", "queries", "documents", "text_1", "text_2", "data_1", "data_2")
"""Where the other routes keep what a model must read."""

_FREE = frozenset({Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
"""Nothing is computed there but tokens."""

_SEVERAL = (("n", Why.N_CHOICES), ("best_of", Why.BEST_OF))
_UNSET = (b"null", b"false")
_OBSTACLES = (
    ("use_beam_search", Why.BEAM_SEARCH),
    ("prompt_logprobs", Why.PROMPT_LOGPROBS),
    ("echo", Why.ECHO),
    ("prompt_embeds", Why.PROMPT_EMBEDS),
)
"""Fields that are an obstacle as soon as they say anything. `prompt_logprobs: 0` asks for those of the prompt itself."""

_MESSAGES = msgspec.json.Decoder(list[_Message])
_PARTS = msgspec.json.Decoder(list[_Part])
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_INTEGER = msgspec.json.Decoder(int)
_SCALAR = msgspec.json.Decoder(int | float | str | bool)


def read_call(
    endpoint: Endpoint,
    body: bytes,
    only_model: Callable[[], str | None] = lambda: None,
    sender: Sender = Sender(),  # noqa: B008  immutable
    beginnings: Beginnings | None = None,
) -> Call:
    """Take a body apart; raises `BadRequestError` where it is not a JSON object that names a model. Routes on which engines
    need none get the `only_model` there is, if there is but one. `beginnings`: names the prompt's, where routing asks."""
    fields = take_apart(body)
    if WAYS[endpoint] is not Way.DISAGGREGATED:
        return _whole(endpoint, fields, only_model, sender)
    model = _model(fields)
    texts, prompts = _prompt(endpoint, fields)
    choices = max(_several(fields, name) for name, _ in _SEVERAL)
    facts = RequestFacts(
        model=model,
        endpoint=endpoint,
        stream=bytes(fields.get("stream", b"")) == b"true",
        prompt_chars=sum(map(len, texts)),
        is_ascii=all(map(str.isascii, texts)),
        sequences=max(1, choices * (prompts or 1)),
        max_tokens=_integer(fields, "max_completion_tokens") or _integer(fields, "max_tokens"),
        obstacle=Why.PROMPT_LIST if prompts is not None else _obstacle(fields),
        prefix=beginnings.name(model, sender.tenant, fields, texts) if beginnings is not None and prompts is None else (),
        tenant=sender.tenant,
        priority=sender.priority,
    )
    return Call(endpoint, fields, facts, _can_continue(fields, facts))


def _whole(endpoint: Endpoint, fields: Fields, only_model: Callable[[], str | None], sender: Sender) -> Call:
    """A request that decodes nothing. Its length is that of what the model reads, quotes and all: close enough for a load."""
    model = (None if "model" in fields else only_model()) or _model(fields)
    read = () if endpoint in _FREE else (bytes(fields[name]) for name in _READ_BY_MODEL if name in fields)
    lengths = [(len(text), text.isascii()) for text in read]
    facts = RequestFacts(
        model=model,
        endpoint=endpoint,
        stream=False,
        prompt_chars=sum(length for length, _ in lengths),
        is_ascii=all(is_ascii for _, is_ascii in lengths),
        max_tokens=0,
        obstacle=Why.OTHER_ROUTE,
        tenant=sender.tenant,
        priority=sender.priority,
    )
    return Call(endpoint, fields, facts, can_continue=False)


def _obstacle(fields: Fields) -> Why | None:
    for name, why in _SEVERAL:
        if name in fields and _several(fields, name) != 1:
            return why
    return next((why for name, why in _OBSTACLES if bytes(fields.get(name, b"null")) not in _UNSET), None)


def _several(fields: Fields, name: str) -> int:
    """How many an engine would take this for; 0 for what it must refuse. Never more than fits a count."""
    raw = bytes(fields.get(name, b"null"))
    if raw == b"null":
        return 1
    value: Any = _decode(_SCALAR, msgspec.Raw(raw))
    try:
        count = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return int(min(count, 1e9)) if math.isfinite(count) and count > 0 and count == int(count) else 0


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
