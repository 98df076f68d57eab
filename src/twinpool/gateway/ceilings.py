"""What one request may ask for: a ceiling for each field with which one request could use up an engine.

Only what is over a ceiling is refused; what is wrong in another way is the engine's to judge. Engines take "3" and 3.0 for 3,
and -1 for everything there is, so both are read so here. Pure.
"""

import math
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from twinpool.config import Ceilings
from twinpool.errors import BadRequestError, Reason
from twinpool.handoff.body import Fields

_NUMBERS = (
    ("n", "n"),
    ("best_of", "best_of"),
    ("logprobs", "logprobs"),
    ("top_logprobs", "logprobs"),
    ("prompt_logprobs", "prompt_logprobs"),
    ("max_tokens", "max_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("max_output_tokens", "max_tokens"),
    ("temperature", "temperature"),
)
"""Fields and their ceilings, where the value itself is what counts."""

_ALL = frozenset({"logprobs", "top_logprobs", "prompt_logprobs"})
"""Where -1 means the whole vocabulary."""

_LENGTHS = (("stop", "stop_sequences"), ("bad_words", "stop_sequences"), ("logit_bias", "logit_bias"))

_REGEX, _GRAMMAR, _SCHEMA, _CHOICES = "regex_bytes", "grammar_bytes", "schema_bytes", "choices"

_GUIDES = {
    "guided_regex": _REGEX,
    "regex": _REGEX,
    "guided_grammar": _GRAMMAR,
    "grammar": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "guided_json": _SCHEMA,
    "json_schema": _SCHEMA,
    "response_format": _SCHEMA,
    "structural_tag": _SCHEMA,
    "guided_choice": _CHOICES,
}
"""The names of vLLM, SGLang and llama.cpp for what an answer must look like."""

_STRUCTURED = {"json": _SCHEMA, "regex": _REGEX, "grammar": _GRAMMAR, "choice": _CHOICES, "structural_tag": _SCHEMA}
"""Inside vLLM's `structured_outputs`."""

_NESTED = re.compile(rb'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_ceilings(fields: Fields, ceilings: Ceilings) -> None:
    """Raises `BadRequestError` that names the first field over its ceiling, and the ceiling."""
    for name, ceiling in _NUMBERS:
        most = getattr(ceilings, ceiling)
        if most is not None and name in fields:
            _check(name, ceiling, _number(fields[name], is_all=name in _ALL), most)
    for name, ceiling in _LENGTHS:
        most = getattr(ceilings, ceiling)
        if most is not None and name in fields:
            _check(name, ceiling, _length(fields[name]), most)
    for name, raw, ceiling in _guides(fields):
        most = getattr(ceilings, ceiling)
        if most is not None:
            _check(name, ceiling, _length(raw) if ceiling == _CHOICES else len(bytes(raw)), most)
        if ceiling == _SCHEMA and ceilings.schema_depth is not None:
            _check(name, "schema_depth", depth(bytes(raw)), ceilings.schema_depth)
    if ceilings.schema_depth is not None and "tools" in fields:
        _check("tools", "schema_depth", depth(bytes(fields["tools"])), ceilings.schema_depth)
    if ceilings.media_domains is not None and "messages" in fields:
        _check_media(fields["messages"], ceilings.media_domains)


def depth(raw: bytes) -> int:
    """How many levels of arrays and objects a JSON value has. Brackets inside strings are none."""
    level = deepest = 0
    for match in _NESTED.finditer(raw):
        if match[1]:
            level += 1
            deepest = max(deepest, level)
        elif match[2]:
            level -= 1
    return deepest


def _guides(fields: Fields) -> Iterator[tuple[str, msgspec.Raw, str]]:
    for name in _GUIDES.keys() & fields.keys():
        yield name, fields[name], _GUIDES[name]
    if "structured_outputs" in fields:
        try:
            inner = _OBJECT.decode(fields["structured_outputs"])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        for name in _STRUCTURED.keys() & inner.keys():
            yield f"structured_outputs.{name}", inner[name], _STRUCTURED[name]


def _check(name: str, ceiling: str, value: float, most: float) -> None:
    if value > most:
        shown = "everything" if math.isinf(value) else f"{value:g}"
        message = f"{name} asks for {shown}; at most {most:g} is allowed here (limits.{ceiling})"
        raise BadRequestError(message, Reason.INVALID_VALUE, param=name)


def _number(raw: msgspec.Raw, *, is_all: bool) -> float:
    try:
        value = float(msgspec.json.decode(raw))
    except OverflowError:
        value = math.inf
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError, RecursionError):
        return 0.0
    return math.inf if is_all and value < 0 else value


def _length(raw: msgspec.Raw) -> int:
    try:
        value: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    return len(value) if isinstance(value, list | dict) else 1


def _check_media(raw: msgspec.Raw, domains: tuple[str, ...]) -> None:
    try:
        messages = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for url in _urls(messages):
        if not _is_allowed(url, domains):
            message = "a media URL points where none may be fetched from here (limits.media_domains); send the data itself"
            raise BadRequestError(message, Reason.INVALID_VALUE, param="messages")


def _urls(messages: Any) -> Iterator[str]:
    """Every `image_url`, `video_url`, `audio_url` and the like, in whatever depth, as text or as an object with a `url`."""
    waiting = [messages]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, dict):
            for name, inner in value.items():
                url = inner.get("url") if isinstance(inner, dict) else inner
                if name.endswith("_url") and isinstance(url, str):
                    yield url
                waiting.append(inner)


def _is_allowed(url: str, domains: tuple[str, ...]) -> bool:
    """Data, or a host of the list by name. What two readers of URLs could read in two ways is no URL here."""
    if url[:5].lower() == "data:":
        return True
    if not url.isprintable() or set(url) & set("\\ @"):
        return False
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and host is not None and host in {domain.lower() for domain in domains}
