"""Fetching a prompt's KV from the worker that prefilled it.

    decode worker                                   prefill worker
      POST /v1/kv/<handle>/claim ────────────────►  ledger: held → spent, or a clear 4xx
        the handle, and: my folder, its marker      can I read that marker? then rename the file into it
      ◄──────────────── {"transport": "shared_memory"}   no byte was copied
      ◄──────────────── the file's bytes                 else

Once claimed the KV is the decode worker's: the lease no longer matters, and what arrives cannot change under its
reader.
"""

import asyncio
import struct
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from twinpool.errors import HandleError, Reason, UpstreamError
from twinpool.worker.shared_memory import KvFolder
from twinpool.worker.signing import Handle

SHARED_MEMORY, TCP = "shared_memory", "tcp"
_CHUNK_BYTES = 2**20
# A slot saved by the pinned llama.cpp, in little-endian words of 32 bits: magic, version, how many words of tokens come; these
# are a mark, the version of their packing, how many tokens, the tokens, no media. Then the KV.
_FILE_HEAD = (0x67677371, 4)
_PACKED_HEAD = (0xFFFFFFFF, 1)
_HEAD_WORDS = struct.Struct("<6I")


class Claim(msgspec.Struct, frozen=True):
    """What the decode worker sends."""

    params: dict[str, Any]
    shared_folder: str | None = None
    marker: str = ""


class Moved(msgspec.Struct, frozen=True):
    """What the prefill worker answers when the file was renamed into the decode worker's folder."""

    transport: str
    kv_bytes: int


class Pulled(msgspec.Struct, frozen=True):
    file_name: str
    kv_bytes: int
    transport: str


def kv_file_name(handle_id: str) -> str:
    return f"{handle_id}.kv"


async def pull(
    session: aiohttp.ClientSession,
    handle: Handle,
    params: dict[str, Any],
    folder: KvFolder,
    *,
    offer_shared_memory: bool,
    timeout_s: float,
) -> Pulled:
    """The KV lies in `folder` afterwards, and is the caller's to remove. Raises `HandleError` as the prefill worker
    says, `UpstreamError` if it cannot be reached or breaks off; then nothing is left behind."""
    claim = Claim(params, folder.name if offer_shared_memory else None, folder.marker if offer_shared_memory else "")
    name = kv_file_name(handle.handle_id)
    url = f"{base_url(handle.host, handle.port)}/v1/kv/{handle.handle_id}/claim"
    try:
        async with asyncio.timeout(timeout_s), session.post(url, data=msgspec.json.encode(claim)) as response:
            if response.status == 200:
                if response.content_type != "application/json":
                    return Pulled(name, await _receive(response, folder.file(name)), TCP)
                moved = msgspec.json.decode(await response.read(), type=Moved)
                return Pulled(name, moved.kv_bytes, moved.transport)
            refusal = _refusal(response.status, await response.read())
    except BaseException as error:
        folder.remove(name)
        if isinstance(error, TimeoutError):
            raise _failed(f"did not hand the KV over within {timeout_s:g} s") from None
        if isinstance(error, aiohttp.ClientError | OSError | msgspec.DecodeError):
            raise _failed(f"could not be pulled from: {error}") from error
        raise
    raise refusal  # nothing came: a file of that name is another request's, which brought the same handle first


async def release(session: aiohttp.ClientSession, handle: Handle, signature: str, timeout_s: float) -> None:
    """Tells the prefill worker that nobody will come for the KV."""
    url = f"{base_url(handle.host, handle.port)}/v1/kv/{handle.handle_id}"
    async with asyncio.timeout(timeout_s), session.delete(url, headers={SIGNATURE_HEADER: signature}):
        pass


SIGNATURE_HEADER = "x-twinpool-signature"


def base_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def tokens_in_file(path: Path) -> bytes:
    """The packed token ids that a saved slot was computed from. Raises `UpstreamError` for any other file."""
    with path.open("rb") as file:
        head = file.read(_HEAD_WORDS.size)
        if len(head) == _HEAD_WORDS.size:
            magic, version, words, mark, packing, count = _HEAD_WORDS.unpack(head)
            if (magic, version) == _FILE_HEAD and (mark, packing) == _PACKED_HEAD and words == count + 4:
                tokens = file.read(count * 4)
                if len(tokens) == count * 4:
                    return tokens
    raise _failed("handed over what is no saved KV")


async def _receive(response: aiohttp.ClientResponse, path: Path) -> int:
    received = 0
    with path.open("wb") as file:  # memory: a write does not wait for a disk
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            file.write(chunk)
            received += len(chunk)
    if received != response.content_length:
        raise _failed(f"broke off after {received} of {response.content_length} bytes")
    return received


def _refusal(status: int, raw: bytes) -> HandleError | UpstreamError:
    try:
        error = msgspec.json.decode(raw)["error"]
        if error["type"] == HandleError.kind:
            return HandleError(error["message"], Reason(error["code"]))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        pass
    return _failed(f"answered a claim with {status}")


def _failed(what: str) -> UpstreamError:
    return UpstreamError(f"the prefill worker {what}", Reason.HANDOFF_FAILED)
