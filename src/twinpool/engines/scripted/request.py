"""What a body asks for, and vLLM's objections to it."""

from dataclasses import dataclass
from typing import Any

from twinpool.engines.scripted.answers import Text, chat_prompt, natural_start
from twinpool.engines.scripted.script import Script


class Objection(Exception):  # noqa: N818  an engine's answer, not our failure
    """A 4xx in vLLM's words."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion request, understood. `limit_tokens` is None without one."""

    model: str
    is_chat: bool
    prompts: tuple[str, ...]
    n: int
    limit_tokens: int | None
    min_tokens: int
    ignores_eos: bool
    stops: tuple[str, ...]
    logprobs: int | None
    streams: bool
    includes_usage: bool
    usage_in_every_event: bool
    kv: dict[str, Any]

    @property
    def hands_over(self) -> bool:
        """It is a prefill leg."""
        return bool(self.kv.get("do_remote_decode"))

    @property
    def takes_over(self) -> bool:
        """It is a decode leg."""
        return bool(self.kv.get("do_remote_prefill"))

    def text(self, prompt: str, choice: int, answer_tokens: int, room_tokens: int) -> Text:
        """What to say to that prompt; whichever the engine's KV holds."""
        start = natural_start(prompt)
        natural = max(answer_tokens - start, self.min_tokens)
        limit = room_tokens if self.limit_tokens is None else min(self.limit_tokens, room_tokens)
        count = limit if self.ignores_eos else min(natural, limit)
        reason = "stop" if natural < limit and not self.ignores_eos else "length"
        return Text.of(prompt, choice, count, reason, self.stops, leads_with_space=not self.is_chat or start > 0)


def understand(body: Any, *, is_chat: bool, script: Script) -> Asked:
    """Raises Objection where vLLM would, or only where it must if the script does not validate. Unknown fields pass."""
    if not isinstance(body, dict):
        raise Objection("the body is not a JSON object")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Objection("stream_options must be an object.", param="stream_options")
    limit = body.get("max_completion_tokens") if is_chat else None
    limit = body.get("max_tokens") if limit is None else limit
    stop = body.get("stop") or ()
    asked = Asked(
        model=body.get("model") or script.models[0],
        is_chat=is_chat,
        prompts=_prompts(body, is_chat),
        n=_integer(body, "n", 1),
        limit_tokens=limit if isinstance(limit, int) else None,
        min_tokens=_integer(body, "min_tokens", 0),
        ignores_eos=bool(body.get("ignore_eos")),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=_logprobs(body, is_chat),
        streams=bool(body.get("stream")),
        includes_usage=bool(options.get("include_usage")),
        usage_in_every_event=bool(options.get("continuous_usage_stats")),
        kv=body.get("kv_transfer_params") or {},
    )
    if asked.model not in script.models and asked.model not in script.loras:
        message = f"The model `{asked.model}` does not exist."
        raise Objection(message, status=404, kind="NotFoundError", param="model")
    if script.validates:
        _validate(body, asked, script)
    return asked


def _validate(body: dict[str, Any], asked: Asked, script: Script) -> None:
    if asked.limit_tokens is not None and asked.limit_tokens < 1:
        raise Objection(f"max_tokens must be at least 1, got {asked.limit_tokens}.", param="max_tokens")
    if asked.limit_tokens is not None and asked.min_tokens > asked.limit_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={asked.limit_tokens}, got {asked.min_tokens}."
        raise Objection(message, param="min_tokens")
    if body.get("stream_options") is not None and not asked.streams:
        raise Objection("Stream options can only be defined when `stream=True`.", param="stream_options")
    if asked.n < 1:
        raise Objection(f"n must be at least 1, got {asked.n}.", param="n")
    temperature = body.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        raise Objection(f"temperature must be non-negative, got {temperature}.", param="temperature")
    longest = max(len(prompt.split()) for prompt in asked.prompts)
    if longest == 0:
        raise Objection("The prompt is empty.", param="prompt")
    if longest + (asked.limit_tokens or 1) > script.max_model_tokens:
        raise Objection(
            f"This model's maximum context length is {script.max_model_tokens} tokens. However, your request has {longest} "
            f"input tokens and asks for {asked.limit_tokens or 1} more."
        )
    if asked.takes_over and len(asked.prompts) > 1:
        raise Objection("several prompts cannot share one KV handle")


def _prompts(body: dict[str, Any], is_chat: bool) -> tuple[str, ...]:
    if is_chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Objection("messages: a non-empty list is required", param="messages")
        return (chat_prompt(messages, continues=bool(body.get("continue_final_message"))),)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, str) for part in prompt):
            return tuple(prompt)
        if all(isinstance(part, int) for part in prompt):
            return (" ".join(map(str, prompt)),)
        if all(isinstance(part, list) for part in prompt):
            return tuple(" ".join(map(str, part)) for part in prompt)
    raise Objection("prompt: a string, or a list of strings or tokens, is required", param="prompt")


def _logprobs(body: dict[str, Any], is_chat: bool) -> int | None:
    if is_chat:
        return int(body.get("top_logprobs") or 0) if body.get("logprobs") else None
    value = body.get("logprobs")
    return int(value) if value is not None and value is not False else None


def _integer(body: dict[str, Any], key: str, default: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, int):
        raise Objection(f"{key} must be an integer.", param=key)
    return value
