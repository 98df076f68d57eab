"""Both ends of a handoff: keeping a prompt's KV for whoever brings the handle, and taking it over."""

import asyncio
import logging
import secrets
import time

import aiohttp
import msgspec

from twinpool.errors import BadRequestError, HandleError, Reason, UpstreamError
from twinpool.worker.asked import Asked
from twinpool.worker.engine import TOKEN_BYTES
from twinpool.worker.handles import HandleLedger, Held
from twinpool.worker.openai_shapes import Usage
from twinpool.worker.prompt import Prompt
from twinpool.worker.pull import Claim, Pulled, kv_file_name, pull, release, tokens_in_file
from twinpool.worker.settings import WorkerSettings
from twinpool.worker.signing import Handle, Signer
from twinpool.worker.slots import Slot, SlotPool, Ticket
from twinpool.worker.steps import Steps

_log = logging.getLogger(__name__)
_RELEASE_S = 5.0


class Place(msgspec.Struct, frozen=True):
    """What goes into this worker's handles."""

    incarnation: str
    host: str
    port: int
    kv_kind: str  # fingerprint of weights and KV layout


class HandingOver:
    def __init__(
        self, settings: WorkerSettings, place: Place, signer: Signer, steps: Steps, pool: SlotPool, ledger: HandleLedger
    ) -> None:
        self.place, self.ledger = place, ledger
        self._settings, self._signer, self._steps, self._pool = settings, signer, steps, pool
        self._folder, self._metrics = steps.folder, steps.metrics
        self._peers = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        self._reaper: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        await self._peers.close()

    # -- the prefill worker's end

    async def make_handle(self, asked: Asked, prompt: Prompt) -> tuple[Handle, Usage]:
        """Reads the prompt and keeps its KV until the handle is claimed or released, or its lease ends."""
        self._steps.check_room(prompt)
        name = kv_file_name(handle_id := secrets.token_hex(16))
        async with self._pool.join(prompt.tokens) as ticket:
            slot = await ticket.slot(self._settings.queue_timeout_s)
            cached = await self._steps.prefill(ticket, slot, prompt, asked)
            kv_bytes = await self._steps.save(ticket, slot, prompt, name)
        handle = Handle(
            handle_id=handle_id,
            engine_id=self.place.incarnation,
            host=self.place.host,
            port=self.place.port,
            prompt_tokens=prompt.count,
            cached_tokens=cached,
            expires_at=round(time.time() + self.ledger.lease_s, 3),
            prompt_sha256=prompt.sha256,
            model=self.place.kv_kind,
        )
        self.ledger.hold(handle_id, self._signer.sign(handle), name, kv_bytes, time.monotonic())
        self._set_reaper()
        return handle, Usage(prompt.count, 0, cached)

    def claim(self, handle_id: str, claim: Claim) -> Held:
        """Spends the handle: from here on its file is the caller's to give away and to remove. Raises `HandleError`."""
        handle = self._signer.read(claim.params)
        if handle.handle_id != handle_id:
            raise HandleError("the claim is for another KV handle", Reason.HANDLE_FORGED)
        if handle.engine_id != self.place.incarnation:
            raise HandleError("the worker that made this KV handle has restarted", Reason.HANDLE_UNKNOWN)
        held = self.ledger.claim(handle_id, time.monotonic())
        self._set_reaper()
        return held

    def release(self, handle_id: str, signature: str) -> None:
        """Frees the handle; raises `HandleError` if that cannot be, or must not by this signature."""
        known = self.ledger.signature_of(handle_id)
        if known is not None and not secrets.compare_digest(known.encode(), signature.encode()):
            raise HandleError("this KV handle's signature is wrong", Reason.HANDLE_FORGED)
        held = self.ledger.release(handle_id, time.monotonic())
        if held is not None:
            self._folder.remove(held.file_name)
        self._set_reaper()

    def forget(self, handle: Handle) -> None:
        """Nobody will read the answer that carried it."""
        try:
            self.release(handle.handle_id, self._signer.sign(handle))
        except HandleError:
            return  # claimed or over already

    def _set_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
        due = self.ledger.next_expiry()
        self._reaper = None
        if due is not None:
            self._reaper = asyncio.get_running_loop().call_later(max(due - time.monotonic(), 0.0), self._reap)

    def _reap(self) -> None:
        for held in self.ledger.expire(time.monotonic()):
            self._folder.remove(held.file_name)
        self._set_reaper()

    # -- the decode worker's end

    def checked(self, asked: Asked, prompt: Prompt) -> Handle | None:
        """The handle of a decode leg, with everything checked that can be known before anybody is asked. It stays good if this
        raises."""
        if asked.handle is None:
            return None
        handle = self._signer.read(asked.handle)
        if handle.model != self.place.kv_kind:
            raise HandleError("this KV handle was made with another model, engine or number of slots", Reason.HANDLE_FOREIGN)
        if handle.prompt_sha256 != prompt.sha256 or handle.prompt_tokens != prompt.count:
            raise BadRequestError(
                "this KV handle was made for another prompt", Reason.INVALID_VALUE, param="kv_transfer_params"
            )
        return handle

    async def take_over(self, ticket: Ticket, handle: Handle, prompt: Prompt, *, keep: bool) -> tuple[Slot, Pulled]:
        """Pulls the KV while the ticket waits, and puts it into its slot. The file goes, unless it is to be kept for more
        choices."""
        params = self._signer.write(handle)
        try:
            pulled = await pull(
                self._peers,
                handle,
                params,
                self._folder,
                offer_shared_memory=self._settings.shared_memory,
                timeout_s=self._settings.pull_timeout_s,
            )
        except HandleError:
            raise  # it has an end already
        except BaseException:  # above all a client that has gone, maybe in order to release the handle
            self._steps.keep(self._release_there(handle, params["twinpool_signature"]))
            raise
        self._metrics.handoff_bytes.labels("in", pulled.transport).inc(pulled.kv_bytes)
        kept = False
        try:
            if tokens_in_file(self._folder.file(pulled.file_name)) != prompt.kv:
                raise UpstreamError("the KV handed over is another prompt's", Reason.HANDOFF_FAILED)
            slot = await ticket.slot(self._settings.queue_timeout_s)
            try:
                await self._steps.restore(ticket, slot, prompt, pulled.file_name)
            except BadRequestError as error:  # llama.cpp's word for a file it does not like; the client has done no wrong
                raise UpstreamError(f"the KV handed over is not good here: {error}", Reason.HANDOFF_FAILED) from None
            slot.prompt = b""  # no prefix for others: what proves a handoff right must not start from that handoff's KV
            kept = keep
        finally:
            if not kept:
                self._folder.remove(pulled.file_name)
        self._metrics.prompt_tokens_handed_over.inc(len(prompt.kv) // TOKEN_BYTES)
        return slot, pulled

    async def _release_there(self, handle: Handle, signature: str) -> None:
        try:
            await release(self._peers, handle, signature, _RELEASE_S)
        except (aiohttp.ClientError, OSError) as error:
            _log.warning("handle %s is left to its lease: %s", handle.handle_id, error)
        finally:
            self._folder.remove(kv_file_name(handle.handle_id))  # a claim on its way may still have moved it here
