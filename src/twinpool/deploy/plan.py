"""Which workers run where on one machine, decided without touching it.

A worker is bound by its cores (prefill) or by the memory's bandwidth (decode), so no two of them share a core as long as there
are enough. What does not fit is said here, in one line, before a process dies of it.
"""

from dataclasses import dataclass

from twinpool.errors import UserError
from twinpool.machine import Machine

ROLES = ("prefill", "decode", "colocated")

SLOTS = 4  # sequences a worker computes at once: a core's decode step hardly grows up to there
CONTEXT_TOKENS = 8192  # a sequence's share of the KV cache where the model allows more: memory is reserved for all of it
SMALLEST_CONTEXT_TOKENS = 2048  # under this a chat is of no use; better say that memory is short
# A worker beyond weights and KV: interpreter, tokenizer, compute buffers. 100 MB with the default model after work; larger
# models have larger buffers.
OVERHEAD_BYTES = 160_000_000
HANDLES_IN_FLIGHT = 2  # a long prompt's KV being written while the one before is still read


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one model takes. `kv_token_bytes` is one token's KV, `context_tokens` the longest text it was made for."""

    file_bytes: int
    kv_token_bytes: int | None = None
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many workers of each role somebody asked for."""

    prefill: int = 1
    decode: int = 1
    colocated: int = 0

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode, self.colocated) < 0:
            raise UserError("a number of workers cannot be negative")
        if self.prefill + self.decode + self.colocated == 0:
            raise UserError("no worker asked for: give --prefill-workers, --decode-workers or --colocated-workers at least 1")

    def named(self) -> tuple[tuple[str, str], ...]:
        """The id and the role of each."""
        counts = zip(ROLES, (self.prefill, self.decode, self.colocated), strict=True)
        return tuple((f"{role}-{number}", role) for role, count in counts for number in range(count))


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One process's part of the machine: it computes with `threads`, on `cores` where it can be bound to some."""

    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One worker process. `cores` is empty where it is not bound to any; it computes with `threads` either way."""

    id: str
    role: str
    cores: tuple[int, ...]
    threads: int
    slots: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run. `notes` is what the person who asked should know about it; `worker_bytes` is None when unknown."""

    workers: tuple[PlannedWorker, ...]
    gateway_cores: tuple[int, ...]
    worker_bytes: int | None
    notes: tuple[str, ...]


def plan_workers(machine: Machine, wanted: Wanted, model: Footprint) -> Plan:
    """Raises `UserError` when memory or shared memory is too small for it."""
    named = wanted.named()
    slots, context_tokens, notes = _fit_memory(machine, len(named), model)
    if wanted.prefill and wanted.decode:
        _check_shared_memory(machine, model, context_tokens)
    gateway_cores, shares = share_cores(machine, len(named))
    if machine.cpus < len(named):
        notes.append(f"{len(named)} workers share {_text(machine.cpus, 'core')}: they will slow each other down")
    workers = tuple(
        PlannedWorker(name, role, share.cores, share.threads, slots, context_tokens)
        for (name, role), share in zip(named, shares, strict=True)
    )
    return Plan(workers, gateway_cores, _worker_bytes(model, slots, context_tokens), tuple(notes))


def share_cores(machine: Machine, workers: int) -> tuple[tuple[int, ...], list[CoreShare]]:
    """The gateway's cores, and each worker's share."""
    spare, shares = _fair_shares(max(machine.cpus, 1), workers)
    return _pinned(machine, spare), [CoreShare(_pinned(machine, share), len(share)) for share in shares]


def _fair_shares(cpus: int, workers: int) -> tuple[range, list[range]]:
    """The gateway's part of the CPUs, then each worker's, as positions. The first workers get what does not divide evenly:
    they read prompts, which takes all the arithmetic there is."""
    if cpus < workers:
        return range(0), [range(number % cpus, number % cpus + 1) for number in range(workers)]
    spare = 1 if cpus > 2 * workers else 0  # relaying a stream takes a percent of what an engine takes
    share, rest = divmod(cpus - spare, workers)
    shares, start = [], spare
    for number in range(workers):
        stop = start + share + (number < rest)
        shares.append(range(start, stop))
        start = stop
    return range(spare), shares


def _pinned(machine: Machine, share: range) -> tuple[int, ...]:
    """Under a quota every container on the machine would pick the same first cores: there the system had better choose."""
    return tuple(machine.cores[n] for n in share) if len(machine.cores) == machine.cpus else ()


def _fit_memory(machine: Machine, workers: int, model: Footprint) -> tuple[int, int, list[str]]:
    """The most slots, then the longest context, that fit into memory."""
    longest = min(CONTEXT_TOKENS, model.context_tokens or CONTEXT_TOKENS)
    slots, context_tokens = SLOTS, longest
    while (short := _missing_bytes(machine, workers, model, slots, context_tokens)) > 0:
        if slots > 1:
            slots //= 2
        elif context_tokens // 2 >= SMALLEST_CONTEXT_TOKENS:
            context_tokens //= 2
        else:
            raise UserError(
                f"too little memory: {_text(workers, 'worker')} with this model lack{'s' * (workers == 1)} {_size(short)} "
                f"({_size(machine.memory_bytes or 0)} are free); free some, ask for fewer workers or take a smaller --model"
            )
    notes = []
    if slots < SLOTS or context_tokens < longest:
        notes.append(f"memory is short: {_text(slots, 'sequence')} of {context_tokens:,} tokens a worker")
    return slots, context_tokens, notes


def _missing_bytes(machine: Machine, workers: int, model: Footprint, slots: int, context_tokens: int) -> int:
    each = _worker_bytes(model, slots, context_tokens)
    if machine.memory_bytes is None or each is None:
        return 0
    return workers * each - machine.memory_bytes


def _worker_bytes(model: Footprint, slots: int, context_tokens: int) -> int | None:
    """Engines copy the weights into a layout of their own, so each worker counts the whole file."""
    if model.kv_token_bytes is None:
        return None
    return model.file_bytes + OVERHEAD_BYTES + slots * context_tokens * model.kv_token_bytes


def _check_shared_memory(machine: Machine, model: Footprint, context_tokens: int) -> None:
    if machine.shared_memory_bytes is None or model.kv_token_bytes is None:
        return
    needed = HANDLES_IN_FLIGHT * context_tokens * model.kv_token_bytes
    if machine.shared_memory_bytes < needed:
        raise UserError(
            f"too little shared memory: handing over the KV of long prompts takes {_size(needed)}, "
            f"{_size(machine.shared_memory_bytes)} are free in /dev/shm; enlarge it (in a container: --shm-size=1g) "
            "or start --colocated-workers only"
        )


def _text(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"
