"""What a worker is told at its start. Frozen, read once; every default has its reason beside it."""

import msgspec


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One embedded engine process. Also the JSON that ``python -m twinpool.worker`` reads from standard input."""

    model_path: str
    """A GGUF file."""
    model_name: str
    """The name that clients ask for and that answers carry."""
    host: str = "127.0.0.1"  # a worker has no authentication of its own: the gateway is the public side
    port: int = 0  # any free one; the ready line says which
    slots: int = 4
    """Requests at once: more streams share one core's 15 ms a token too thinly. The same for all workers of a fleet: llama.cpp
    reads saved KV only with as many."""
    context_tokens: int | None = None  # a request's; None: the model's, at most MAX_DEFAULT_CONTEXT_TOKENS
    batch_tokens: int = 256
    """Tokens a step, prompt tokens included (llama.cpp's n_batch; its n_ubatch is at most this).
    Prefill of 3,000 tokens on one core ran at 184, 182, 182 and 172 tokens/s with 2,048, 512, 256 and 128: 256 costs
    nothing, and everything that waits for a step to end (other streams, a cancellation) waits an eighth as long as with
    llama.cpp's default of 2,048."""
    cores: tuple[int, ...] | None = None  # None: wherever the system puts it
    threads: int | None = None  # None: as many as cores, or as the process may use
    queue_limit: int = 64  # waiting requests; beyond it a refusal now is kinder than an answer after minutes
    queue_timeout_s: float = 60.0  # longer than any wait that still serves a person
    lease_s: float = 30.0  # what vLLM's NIXL connector gives; a gateway that does not know assumes it
    pull_timeout_s: float = 30.0  # a full context (190 MB for the default model) over 100 Mbit/s takes 15 s
    body_timeout_s: float = 30.0  # half a request, then silence: the client is gone
    drain_timeout_s: float = 40.0  # a lease and a bit: whatever is held by then has expired
    max_body_bytes: int = 32 * 2**20  # far over any text that fits a context
    shared_memory: bool = True  # False: hand over through TCP even on one machine
    handoff_secret: str | None = None  # None: random, so that only this process' own handles are good here
    advertise_host: str | None = None  # where decode workers reach this one; None: host
    exit_with_fd: int | None = None  # read end of a pipe whose other end the parent holds: end of file, end of worker


MAX_DEFAULT_CONTEXT_TOKENS = 8192  # the KV of every slot is allocated at the start: 190 MB a slot for the default model
MAX_UBATCH_TOKENS = 512  # llama.cpp's own default; larger buys nothing on a CPU and only grows the compute buffers
