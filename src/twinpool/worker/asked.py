"""What a client asks for, checked: one frozen record a request, built or refused.

Only what the worker acts on is looked at. The rest of the body goes to llama.cpp as it came: its own extensions and
whatever it learns next keep working, and its own complaints come back as 400.
"""

from typing import Any, Literal

import msgspec

from twinpool.errors import BadRequestError, NotFoundError, Reason

Endpoint = Literal["chat", "completions"]

MAX_CHOICES = 128  # OpenAI's limit for n; here for prompts times n
_COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default for the legacy route; chat has none

# What the worker sets itself, or what would reach past the request's own slot.
_OURS = (
    "id_slot", "cache_prompt", "n", "seed", "stream", "stream_options", "kv_transfer_params", "max_tokens",
    "max_completion_tokens", "n_predict", "prompt", "logprobs", "top_logprobs", "n_probs", "best_of", "echo", "suffix",
    "twinpool_continue",
    "timings_per_token", "return_progress", "return_tokens", "n_cmpl", "n_keep", "n_discard", "n_cache_reuse", "n_indent",
    "t_max_predict_ms", "t_max_prompt_ms", "lora", "model", "verbose", "response_fields",
)  # fmt: skip

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, float("inf")),
    ("top_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Endpoint
    rest: dict[str, Any]
    """The client's fields for llama.cpp, without those that the worker sets."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Completions only: text or token ids each."""
    choices: int = 1
    """For each prompt."""
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    """How many alternatives a token; None without any log-probabilities."""
    timings: bool = False
    use_cache: bool = True
    makes_handle: bool = False
    """A prefill leg."""
    handle: dict[str, Any] | None = None
    """A decode leg: what the prefill's answer said."""
    sent: str | None = None
    """The part of the answer that the client has already, from another engine."""


def parse(endpoint: Endpoint, raw: bytes, served_model: str) -> Asked:
    """Raises `BadRequestError`, or `NotFoundError` for another model."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequestError("the body is not JSON", Reason.INVALID_JSON) from None
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object", Reason.INVALID_JSON)
    _check_model(body.get("model"), served_model)
    choices = _integer(body, "n", 1, MAX_CHOICES) or 1
    makes_handle, handle = _transfer(body)
    if makes_handle:  # its own limit is the one token of every prefill leg; this is its client's
        body["max_tokens"] = body["kv_transfer_params"].get("twinpool_max_tokens")
        body.pop("max_completion_tokens", None)
    prompts: tuple[str | tuple[int, ...], ...] = ()
    if endpoint == "chat":
        _check_messages(body.get("messages"))
    else:
        prompts = _prompts(body)
        _check_legacy(body, choices)
    if len(prompts) * choices > MAX_CHOICES:
        raise BadRequestError(f"at most {MAX_CHOICES} choices a request", Reason.INVALID_VALUE, param="n")
    if (makes_handle or handle is not None) and len(prompts) > 1:
        raise BadRequestError("a handoff is for one prompt", Reason.UNSUPPORTED, param="prompt")
    for name, low, high in _RANGES:
        _check_number(body, name, low, high)
    _check_stop(body.get("stop"))
    stream = _flag(body, "stream")
    return Asked(
        endpoint=endpoint,
        rest={key: value for key, value in body.items() if key not in _OURS},
        prompts=prompts,
        choices=choices,
        max_tokens=_max_tokens(body, endpoint),
        seed=_seed(body),
        stream=stream,
        include_usage=_include_usage(body, stream),
        logprobs=_logprobs(body, endpoint),
        timings=_flag(body, "timings_per_token"),
        use_cache=_flag(body, "cache_prompt", default=True),
        makes_handle=makes_handle,
        handle=handle,
        sent=_sent(body, max(len(prompts), 1) * choices),
    )


def _wrong(message: str, param: str, reason: Reason = Reason.INVALID_VALUE) -> BadRequestError:
    return BadRequestError(message, reason, param=param)


def _check_model(model: Any, served: str) -> None:
    if model is None:
        raise _wrong(f"'model' is required; this worker serves {served!r}", "model", Reason.MISSING_FIELD)
    if not isinstance(model, str):
        raise _wrong("'model' must be text", "model")
    if model != served:
        error = NotFoundError(f"the model {model!r} does not exist here; try {served!r}", Reason.MODEL_NOT_FOUND)
        error.param = "model"
        raise error


def _check_messages(messages: Any) -> None:
    if messages is None:
        raise _wrong("'messages' is required", "messages", Reason.MISSING_FIELD)
    if not isinstance(messages, list) or not messages:
        raise _wrong("'messages' must be a list with at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(f"'messages[{index}]' must be an object with a 'role'", "messages")


def _prompts(body: dict[str, Any]) -> tuple[str | tuple[int, ...], ...]:
    prompt = body.get("prompt")
    if prompt is None:
        raise _wrong("'prompt' is required", "prompt", Reason.MISSING_FIELD)
    if isinstance(prompt, str) or _is_tokens(prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong("'prompt' must be text, token ids, or a list of either, and not empty", "prompt")
    found: list[str | tuple[int, ...]] = []
    for item in prompt:
        if isinstance(item, str) and item:
            found.append(item)
        elif _is_tokens(item):
            found.append(tuple(item))
        else:
            raise _wrong("'prompt' must be text, token ids, or a list of either, and not empty", "prompt")
    return tuple(found)


def _is_tokens(item: Any) -> bool:
    return (
        isinstance(item, list)
        and bool(item)
        and all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in item)
    )


def _check_legacy(body: dict[str, Any], choices: int) -> None:
    if _flag(body, "echo"):
        raise _wrong("'echo' is not supported: put the prompt before the answer yourself", "echo", Reason.UNSUPPORTED)
    if body.get("suffix"):
        raise _wrong("'suffix' (filling the middle) is not supported", "suffix", Reason.UNSUPPORTED)
    best_of = _integer(body, "best_of", 1, MAX_CHOICES)
    if best_of is not None and best_of != choices:
        raise _wrong("'best_of' other than 'n' is not supported", "best_of", Reason.UNSUPPORTED)


def _transfer(body: dict[str, Any]) -> tuple[bool, dict[str, Any] | None]:
    """Whether this is a prefill leg, and the handle if it is a decode leg."""
    params = body.get("kv_transfer_params")
    if params is None:
        return False, None
    name = "kv_transfer_params"
    if not isinstance(params, dict):
        raise _wrong(f"'{name}' must be an object", name)
    gives, takes = params.get("do_remote_decode"), params.get("do_remote_prefill")
    if not all(flag is None or isinstance(flag, bool) for flag in (gives, takes)) or (gives and takes):
        raise _wrong(f"'{name}' must set one of do_remote_decode and do_remote_prefill to true", name)
    return bool(gives), params if takes else None


def _sent(body: dict[str, Any], choices: int) -> str | None:
    asked = body.get("twinpool_continue")
    if asked is None:
        return None
    text = asked.get("text") if isinstance(asked, dict) else None
    if not isinstance(text, str):
        raise _wrong("'twinpool_continue' must be an object with a 'text'", "twinpool_continue")
    beyond_text = ("tools", "functions", "logprobs", "top_logprobs")
    if choices > 1 or not body.get("stream") or any(body.get(name) for name in beyond_text):
        raise _wrong("only a stream of one choice's text can be gone on with", "twinpool_continue", Reason.UNSUPPORTED)
    return text


def _check_stop(stop: Any) -> None:
    stop = [stop] if isinstance(stop, str) else stop
    if stop is None:
        return
    if isinstance(stop, list) and not all(stop):
        raise _wrong("'stop' must not be empty text", "stop")  # llama.cpp would stop at once
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise _wrong("'stop' must be text or a list of texts", "stop")  # llama.cpp would take no notice of it


def _max_tokens(body: dict[str, Any], endpoint: Endpoint) -> int | None:
    most = 2**31 - 1  # the context is checked when the prompt's length is known
    new = _integer(body, "max_completion_tokens", 1, most) if endpoint == "chat" else None
    old = _integer(body, "max_tokens", 1, most)
    asked = new if new is not None else old
    return _COMPLETIONS_MAX_TOKENS if asked is None and endpoint == "completions" else asked


def _logprobs(body: dict[str, Any], endpoint: Endpoint) -> int | None:
    if endpoint == "completions":
        return _integer(body, "logprobs", 0, 20)
    top = _integer(body, "top_logprobs", 0, 20)
    if _flag(body, "logprobs"):
        return top or 0
    if top:
        raise _wrong("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return None


def _seed(body: dict[str, Any]) -> int | None:
    seed = body.get("seed")
    if seed is None:
        return None
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise _wrong("'seed' must be an integer", "seed")
    return seed


def _include_usage(body: dict[str, Any], stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise _wrong("'stream_options' needs 'stream': true", "stream_options")
    if not isinstance(options, dict):
        raise _wrong("'stream_options' must be an object", "stream_options")
    return _flag(options, "include_usage")


def _flag(body: dict[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(f"'{name}' must be true or false", name)
    return value


def _integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        limits = f"at least {low}" if high >= 2**31 - 1 else f"from {low} to {high}"
        raise _wrong(f"'{name}' must be an integer, {limits}", name)
    return value


def _check_number(body: dict[str, Any], name: str, low: float, high: float) -> None:
    value = body.get(name)
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        limits = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise _wrong(f"'{name}' must be a number, {limits}", name)
