"""llama.cpp inside this process, and the few of its routes that the worker uses.

xllamacpp runs llama.cpp's own HTTP server on threads of its own; it listens on a Unix socket in the worker's private
folder, so that nobody else can reach it. Two habits of that server shape this file (both seen in the pinned version):

- it notices that its client has gone only when it writes. Whatever may run for long is therefore asked for as a
  stream, prefill with progress events: dropping the connection then stops it within one step;
- it may still compute for a moment after that, so whoever dropped one waits for `settle` before the slot is anybody
  else's.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from twinpool.errors import BadRequestError, Reason, RequestError, UpstreamError, UserError
from twinpool.worker.gguf_header import read_header
from twinpool.worker.settings import MAX_DEFAULT_CONTEXT_TOKENS, MAX_UBATCH_TOKENS, WorkerSettings

TOKEN_BYTES = 4
_ANSWER_S = 120.0  # for the short calls: they wait at most for the step that is running
_SETTLE_S = 120.0
_SETTLE_STEP_S = 0.03
_READ_BUFFER_BYTES = 2**20
_PROBE_TOKENS = (8, 24)  # two short prompts: their difference is the KV of 16 tokens


def packed(tokens: list[int]) -> bytes:
    """Token ids as one comparable, hashable string of bytes: 32 bits each."""
    return b"".join(token.to_bytes(TOKEN_BYTES, "little", signed=True) for token in tokens)


def unpacked(tokens: bytes) -> list[int]:
    return list(memoryview(tokens).cast("i"))


class EngineFacts(msgspec.Struct, frozen=True):
    version: str
    context_tokens: int
    kv_bytes_per_token: int
    kv_bytes_fixed: int
    reuse_tokens: int
    """Prefixes are reused in multiples of this: where a cold prefill would have cut the prompt, too."""

    def kv_bytes(self, tokens: int) -> int:
        return self.kv_bytes_fixed + tokens * self.kv_bytes_per_token


class Engine:
    """Start one a process. Every call is about one slot, which the caller holds."""

    def __init__(self, settings: WorkerSettings, folder: Path, threads: int) -> None:
        """Loads the model: a second for a small one, minutes for a large one. Raises `UserError`."""
        try:
            import xllamacpp  # an extra
        except ImportError:
            raise UserError("the embedded engine is not installed: pip install 'twinpool[local]'") from None
        path = Path(settings.model_path)
        context = settings.context_tokens or min(read_header(path).context_tokens, MAX_DEFAULT_CONTEXT_TOKENS)
        self._folder = folder
        self._socket = folder / "engine.sock"
        ubatch = min(settings.batch_tokens, MAX_UBATCH_TOKENS)
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.model_alias = {settings.model_name}
        params.hostnames = [str(self._socket)]
        params.n_parallel = settings.slots
        params.n_ctx = context * settings.slots
        params.n_batch = settings.batch_tokens
        params.n_ubatch = ubatch
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        params.n_threads_http = settings.slots * 2 + 8  # a stream holds one; short calls must not wait for its end
        params.slot_save_path = f"{folder}/"
        params.endpoint_slots = True
        params.cache_ram_mib = 0  # 8 GB by default: memory would not stay flat
        params.slot_prompt_similarity = 0.0  # slots are assigned here, never there
        params.ctx_shift = False  # forgetting the middle of a prompt in silence is no answer
        params.sse_ping_interval = -1
        params.ui = False
        params.verbosity = 1
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise UserError(f"llama.cpp could not load {path}: {error}") from None
        self._build = xllamacpp.__version__
        self._reuse = ubatch if settings.batch_tokens % ubatch == 0 else settings.batch_tokens
        self.facts: EngineFacts

    async def open(self) -> None:
        """Connects, proves that KV can be saved here, and measures what a token of it takes."""
        self._session = aiohttp.ClientSession(
            "http://engine",
            connector=aiohttp.UnixConnector(str(self._socket), limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_READ_BUFFER_BYTES,
        )
        properties = await self._call("GET", "/props")
        sizes = []
        for count in _PROBE_TOKENS:  # ids 0 are as good as any
            await self.prefill(0, packed([0] * count), keep=False)
            sizes.append(await self.save(0, "probe.kv"))
        self._folder.joinpath("probe.kv").unlink()
        per_token = (sizes[1] - sizes[0]) // (_PROBE_TOKENS[1] - _PROBE_TOKENS[0])
        self.facts = EngineFacts(
            version=f"xllamacpp {self._build}",
            context_tokens=properties["default_generation_settings"]["n_ctx"],
            kv_bytes_per_token=per_token,
            kv_bytes_fixed=sizes[0] - per_token * _PROBE_TOKENS[0],
            reuse_tokens=self._reuse,
        )

    async def close(self) -> None:
        await self._session.close()

    # -- text and tokens

    async def chat_prompt(self, body: dict[str, Any]) -> str:
        """The text that the model's chat template makes of a chat body. Raises `BadRequestError` where it refuses."""
        try:
            answer = await self._call("POST", "/apply-template", body)
        except UpstreamError as error:  # it only computes text: what it cannot do is the client's to change (an image, say)
            raise BadRequestError(error.message, param="messages") from None
        return str(answer["prompt"])

    async def tokenize(self, text: str, *, is_prompt: bool = True) -> bytes:
        """Of a prompt, with the special tokens that belong there and stand in it; or of plain text."""
        asked = {"content": text, "add_special": is_prompt, "parse_special": is_prompt}
        answer = await self._call("POST", "/tokenize", asked)
        return packed(answer["tokens"])

    # -- one slot's KV

    async def prefill(self, slot: int, tokens: bytes, *, keep: bool, computed: list[int] | None = None) -> int:
        """Reads a prompt into a slot and says how many tokens were computed; `computed` follows it as it goes, for
        the sake of whoever cancels. With `keep`, what the slot holds of it already is not computed again."""
        body = {
            "prompt": unpacked(tokens),
            "n_predict": 0,
            "temperature": 0,
            "id_slot": slot,
            "cache_prompt": keep,
            "stream": True,
            "return_progress": True,
        }
        done = 0
        async with self.stream("/completion", body) as events:
            async for event in events:
                if b'"prompt_progress"' in event:
                    progress = msgspec.json.decode(event[6:])["prompt_progress"]
                    done = progress["processed"] - progress["cache"]
                elif b'"timings"' in event:
                    done = msgspec.json.decode(event[6:])["timings"]["prompt_n"]
                if computed is not None:
                    computed[0] = done
        return done

    async def save(self, slot: int, name: str) -> int:
        """Writes the slot's KV into the worker's folder; its size in bytes."""
        answer = await self._call("POST", f"/slots/{slot}?action=save", {"filename": name})
        return int(answer["n_written"])

    async def restore(self, slot: int, name: str) -> int:
        """Reads a file of the worker's folder into the slot; how many tokens it held."""
        answer = await self._call("POST", f"/slots/{slot}?action=restore", {"filename": name})
        return int(answer["n_restored"])

    async def settle(self, slot: int) -> None:
        """Returns once llama.cpp has let go of a slot whose request was dropped. Two idle answers: the first may have
        come before the dropped request was even read."""
        idle, until = 0, time.monotonic() + _SETTLE_S
        while idle < 2 and time.monotonic() < until:
            await asyncio.sleep(_SETTLE_STEP_S)
            slots = await self._call("GET", "/slots")
            idle = 0 if slots[slot]["is_processing"] else idle + 1

    # -- HTTP

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of a streamed answer, each as ``data: …`` without its blank line. Entering raises `RequestError`
        if llama.cpp refused; leaving early drops the request."""
        try:
            async with self._session.post(path, data=msgspec.json.encode(body), headers=_JSON) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                yield _events(response.content)
        except aiohttp.ClientError as error:
            raise UpstreamError(f"the engine broke off: {error}") from error

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                self._session.request(method, path, data=data, headers=_JSON) as response,
            ):
                raw = await response.read()
        except aiohttp.ClientError as error:
            raise UpstreamError(f"the engine broke off: {error}") from error
        except TimeoutError:
            raise UpstreamError(f"the engine did not answer {path} within {_ANSWER_S:g} s") from None
        if response.status != 200:
            raise _refusal(response.status, raw)
        return msgspec.json.decode(raw)


_JSON = {"content-type": "application/json"}


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in content.iter_any():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event
            elif event.startswith(b"error: "):
                raise _refusal(500, event[7:])
    if rest.strip():
        raise UpstreamError("the engine's stream ended in the middle of an event")


def _refusal(status: int, raw: bytes) -> RequestError:
    """llama.cpp's own error in our shape: its 400s are the client's, and its template's complaints come as 500."""
    try:
        error = msgspec.json.decode(raw)
        error = error.get("error", error)
        message, kind = str(error["message"]), error.get("type")
    except (msgspec.DecodeError, AttributeError, KeyError, TypeError):
        message, kind = raw[:200].decode(errors="replace"), None
    if kind == "exceed_context_size_error":
        return BadRequestError(message, Reason.CONTEXT_LENGTH)
    if status in (400, 404, 501):
        return BadRequestError(message)
    return UpstreamError(f"the engine failed: {message}")
