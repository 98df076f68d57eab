"""A KV handle as it travels: the dictionary of vLLM's NIXL connector, signed with the fleet's secret.

The decode worker checks the signature before it connects anywhere, so a client cannot make it call a host of the
client's choice, nor decode KV that another fleet or another model wrote. The signature covers everything the decode
worker acts on.
"""

import hashlib
import hmac
from typing import Any

import msgspec

from twinpool.errors import BadRequestError, HandleError, Reason

_FORM = "twinpool-kv-1"  # changes with the meaning of what is signed


class Handle(msgspec.Struct, frozen=True):
    handle_id: str  # 128 bits from the system: knowing it is part of the right to it
    engine_id: str  # the incarnation of the prefill worker: a restart is another one
    host: str
    port: int
    prompt_tokens: int
    cached_tokens: int  # what the prefill found in its cache: the decode leg's usage repeats it
    expires_at: float  # by the prefill worker's wall clock; informs people, the ledger decides
    prompt_sha256: str  # of the token ids
    model: str  # fingerprint of weights and KV layout


class Signer:
    def __init__(self, secret: str) -> None:
        self._key = hashlib.sha256(f"{_FORM}:{secret}".encode()).digest()
        self.key_id = hashlib.sha256(b"id:" + self._key).hexdigest()[:12]

    def sign(self, handle: Handle) -> str:
        return hmac.new(self._key, msgspec.json.encode([_FORM, handle]), hashlib.sha256).hexdigest()

    def write(self, handle: Handle) -> dict[str, Any]:
        """The ``kv_transfer_params`` of a prefill's answer, to be given to the decode worker as they are."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [0],  # one file: the KV of the whole prompt
            "remote_engine_id": handle.engine_id,
            "remote_request_id": handle.handle_id,
            "remote_host": handle.host,
            "remote_port": handle.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": handle.prompt_tokens,
            "remote_blocks_expiry_time": handle.expires_at,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": handle.cached_tokens,
            "twinpool_prompt_sha256": handle.prompt_sha256,
            "twinpool_model": handle.model,
            "twinpool_key_id": self.key_id,
            "twinpool_signature": self.sign(handle),
        }

    def read(self, params: dict[str, Any]) -> Handle:
        """Raises `HandleError` (403) for what this fleet did not sign, `BadRequestError` for what is no handle at
        all."""
        try:
            handle = msgspec.convert(
                {
                    "handle_id": params.get("remote_request_id"),
                    "engine_id": params.get("remote_engine_id"),
                    "host": params.get("remote_host"),
                    "port": params.get("remote_port"),
                    "prompt_tokens": params.get("remote_num_tokens"),
                    "cached_tokens": params.get("remote_prefill_cached_tokens"),
                    "expires_at": params.get("remote_blocks_expiry_time"),
                    "prompt_sha256": params.get("twinpool_prompt_sha256", ""),
                    "model": params.get("twinpool_model", ""),
                },
                Handle,
            )
        except msgspec.ValidationError as error:
            raise BadRequestError(
                f"kv_transfer_params is not a handle: {error}", Reason.INVALID_VALUE, param="kv_transfer_params"
            ) from None
        key_id, signature = params.get("twinpool_key_id"), params.get("twinpool_signature")
        if not isinstance(key_id, str) or not isinstance(signature, str):
            raise HandleError("this KV handle is not signed", Reason.HANDLE_FORGED)
        if key_id != self.key_id:
            raise HandleError("this KV handle comes from another fleet (its secret differs)", Reason.HANDLE_FOREIGN)
        if not hmac.compare_digest(signature.encode(), self.sign(handle).encode()):
            raise HandleError("this KV handle's signature is wrong", Reason.HANDLE_FORGED)
        return handle
