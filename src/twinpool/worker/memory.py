"""Does it fit? Asked before llama.cpp tries: running out of memory kills a process without a word."""

from pathlib import Path

from twinpool.errors import UserError
from twinpool.machine import read_machine
from twinpool.worker.gguf_header import GgufHeader
from twinpool.worker.settings import MAX_DEFAULT_CONTEXT_TOKENS, WorkerSettings
from twinpool.worker.shared_memory import KvFolder

_MIB = 2**20


def _context(settings: WorkerSettings, header: GgufHeader) -> int:
    return settings.context_tokens or min(header.context_tokens, MAX_DEFAULT_CONTEXT_TOKENS)


def check(settings: WorkerSettings, header: GgufHeader, model: Path) -> None:
    """Raises `UserError` if weights and KV of all slots are more than what is free."""
    free = read_machine().memory_bytes
    if free is None or header.kv_bytes_per_token is None:
        return
    kv = header.kv_bytes_per_token * _context(settings, header) * settings.slots
    needed = model.stat().st_size + kv
    if needed > free:
        raise UserError(
            f"{model.name} needs {needed // _MIB} MiB ({kv // _MIB} of them for {settings.slots} slots of "
            f"{_context(settings, header)} tokens), {free // _MIB} MiB are free: fewer --slots or --context-tokens"
        )


def check_shared(settings: WorkerSettings, header: GgufHeader, folder: KvFolder) -> None:
    """Raises `UserError` if the longest prompt's KV could not be handed over. Docker gives 64 MiB by default."""
    needed = (header.kv_bytes_per_token or 0) * _context(settings, header)
    free = folder.free_bytes()
    if needed > free:
        raise UserError(
            f"the longest prompt's KV takes {needed // _MIB} MiB of {folder.path.parent.parent}, {free // _MIB} MiB are "
            "free: give it more (docker run --shm-size=2g) or use fewer --context-tokens"
        )
