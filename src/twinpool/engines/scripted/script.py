"""What a test sets and what it can look at afterwards."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import msgspec

_JSON = ((b"content-type", b"application/json"),)
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)


class End(StrEnum):
    """How an answer ends."""

    END = "end"  # in good order. An event stream "closed cleanly without DONE" is this, without that event
    HANG = "hang"  # nothing more, until the client leaves
    RESET = "reset"  # RST
    CLOSE = "close"  # FIN, without the final chunk


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer in place of the engine's own: `body` whole, or `chunks` as (delay in seconds, bytes)."""

    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = _JSON
    body: bytes = b""
    chunks: Iterable[tuple[float, bytes]] | None = None
    head_delay_s: float = 0.0
    end: End = End.END
    is_raw: bool = False
    """The chunks are what goes over the wire: no head, no framing but theirs."""
    pulls_kv: bool = False  # a decode leg fetches its KV first, as an engine must that writes a token

    @classmethod
    def json(cls, value: Any, *, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> "Reply":
        return cls(status=status, headers=_JSON + headers, body=msgspec.json.encode(value))

    @classmethod
    def error(cls, status: int, message: str = "scripted", *, headers: tuple[tuple[bytes, bytes], ...] = ()) -> "Reply":
        """In vLLM's envelope."""
        return cls.json(error_envelope(status, message), status=status, headers=headers)

    @classmethod
    def stream(cls, *chunks: bytes, interval_s: float = 0.0, end: End = End.END) -> "Reply":
        """An event stream; chunk edges may fall anywhere in an event."""
        return cls(headers=_EVENTS, chunks=tuple((interval_s, chunk) for chunk in chunks), end=end, pulls_kv=True)

    @classmethod
    def hang(cls) -> "Reply":
        """Takes the request and says nothing."""
        return cls(chunks=(), is_raw=True, end=End.HANG)

    @classmethod
    def reset(cls) -> "Reply":
        """Takes the request and resets the connection."""
        return cls(chunks=(), is_raw=True, end=End.RESET)


@dataclass(frozen=True, slots=True)
class Default:
    """The engine's own answer, but."""

    delay_s: float = 0.0  # before anything else
    stops_after_events: int | None = None  # streamed: that many events go out, the role's included; otherwise none of it
    end: End = End.END  # what happens then
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)  # merged over the true one
    handle: dict[str, Any] | Literal["true", "absent"] | None = "true"  # what prefill answers as kv_transfer_params


@dataclass(slots=True, eq=False)
class Recorded:
    """One request, as it came and as it went. Times on `time.monotonic`."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any  # parsed, or None if it is not JSON
    raw: bytes
    arrived_at: float
    attempt: int  # 1 for the first request with this x-request-id, or without one
    incarnation: int
    status: int | None = None
    finished_at: float | None = None
    disconnected_at: float | None = None
    """The client left before its answer was finished."""
    was_aborted: bool = False
    """By `/abort_request`."""

    @property
    def is_running(self) -> bool:
        return self.finished_at is None and self.disconnected_at is None

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        params = self.body.get("kv_transfer_params") if isinstance(self.body, dict) else None
        return params if isinstance(params, dict) else None

    @property
    def takes_over(self) -> bool:
        """It is a decode leg."""
        return bool((self.kv_transfer_params or {}).get("do_remote_prefill"))


Decision = Reply | Default | None


@dataclass(slots=True)
class Script:
    """May be changed at any moment; what runs already keeps to what it read. All delays are multiplied by `time_scale`,
    leases too."""

    models: tuple[str, ...] = ("scripted",)
    validates: bool = True
    max_model_tokens: int = 8192
    api_key: str | None = None
    health_status: int = 200
    is_embedded: bool = False
    """It has what the embedded worker has beside vLLM's dialect: it says what it is, and frees a handle on DELETE."""
    kind: Literal["vllm", "sglang", "llama.cpp", "openai"] = "vllm"  # whose pages it has, where it is not embedded
    version: str = "0.32.0+scripted"
    connector: Literal["nixl", "none"] = "nixl"  # none: no handle in its answers, no series of NIXL in its metrics
    cache_dtype: str = "auto"
    loras: dict[str, str] = field(default_factory=dict)  # adapters, and what each stands on
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"  # as SGLang
    caches_prompts: bool = False
    """A prompt that it has seen under the same `cache_salt` is not pulled again, and answered from what was pulled then."""
    slots: int = 256  # what it says; not kept to
    tells_handoff: bool = True  # when embedded: seconds and bytes of a handoff, in the head of the answer

    prefill_s_per_token: float = 0.0
    token_interval_s: float = 0.0
    steps: asyncio.Semaphore | None = None
    """In place of the interval: each token waits until the test has released one more."""
    answer_tokens: int = 16  # what it says when no limit is lower
    time_scale: float = 1.0

    lease_s: float = 30.0
    handoff_s: float = 0.0
    bytes_per_token: int = 1024
    kv_readable_after_s: float = 0.0  # prefill's answer comes first
    unreadable_kv: Literal["wait", "refuse"] = "wait"  # as decode: refuse is 503, and the handle stays held
    load_failure: Literal["fail", "recompute"] = "fail"  # as decode: prefill cannot be reached, or the pair is poisoned
    poisoned_peers: set[str] = field(default_factory=set)  # as decode: "host:port" of prefill workers; the pull fails
    garbled_peers: set[str] = field(default_factory=set)  # the same, and the pull goes well: HTTP 200 and garbage
    handle_extras: dict[str, Any] = field(default_factory=dict)  # further keys in the handles

    replies: deque[Reply | Default] = field(default_factory=deque)  # for the next completions, one each
    on_request: Callable[[Recorded], Decision] | None = None  # asked when there are none; None is the engine's own answer
    metrics: dict[str, float | None] = field(default_factory=dict)  # in place of the true values; None: no such series
    metrics_timestamp_ms: int | None = None
    pages_wait: asyncio.Event | None = None  # probes and scrapes hang until it is set; completions do not

    def decide(self, recorded: Recorded) -> Reply | Default:
        if self.replies:
            return self.replies.popleft()
        return (self.on_request(recorded) if self.on_request else None) or Default()


def error_envelope(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> dict[str, Any]:
    """vLLM's, whose code is the status."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
