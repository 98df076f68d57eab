"""The few facts of a GGUF file that are needed before llama.cpp loads it: is it one, how long is its context, how much
KV does a token take, and a fingerprint that two workers of one fleet can compare."""

import hashlib
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from twinpool.errors import UserError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_FINGERPRINT_PIECES, _PIECE_BYTES = 256, 64 * 1024  # 16 MiB spread over the file: milliseconds, also for 40 GB


class GgufHeader(msgspec.Struct, frozen=True):
    architecture: str
    context_tokens: int
    kv_bytes_per_token: int | None
    """What an f16 cache takes, or None where the header does not tell; an estimate, for the check of memory only."""


def read_header(path: Path) -> GgufHeader:
    """Raises `UserError` for a file that is missing, unreadable or not a GGUF."""
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise UserError(f"cannot read the model {path}: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError, KeyError, EOFError):
        raise UserError(f"{path} is a damaged GGUF file: fetch it again") from None


def _read(file: BinaryIO, path: Path) -> GgufHeader:
    if file.read(4) != b"GGUF":
        raise UserError(f"{path} is not a GGUF file; --model wants one, such as model.Q8_0.gguf")
    version, _tensors, pairs = struct.unpack("<IQQ", file.read(20))
    if version not in (2, 3):
        raise UserError(f"{path} is GGUF version {version}; versions 2 and 3 can be read")
    found: dict[str, Any] = {}
    for _ in range(pairs):
        key = _string(file)
        found[key] = _value(file, struct.unpack("<I", file.read(4))[0])
        if key.startswith("tokenizer."):
            break  # the long arrays; writers put them after the architecture's keys
    architecture = found["general.architecture"]

    def number(name: str) -> int | None:
        value = found.get(f"{architecture}.{name}")
        return value if isinstance(value, int) else None

    context = number("context_length")
    if context is None:
        raise UserError(f"{path} does not say its context length: give --context-tokens a model that does")
    return GgufHeader(architecture, context, _kv_bytes(number))


def _kv_bytes(number: Any) -> int | None:
    layers, heads, embedding = number("block_count"), number("attention.head_count"), number("embedding_length")
    if not layers or not heads or not embedding:
        return None
    kv_heads = number("attention.head_count_kv") or heads
    key = number("attention.key_length") or embedding // heads
    value = number("attention.value_length") or embedding // heads
    return int(layers * kv_heads * (key + value) * 2)


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > 2**24:
        raise EOFError
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", file.read(12))
        if inner in _SCALARS:
            file.seek(count * struct.calcsize(_SCALARS[inner]), os.SEEK_CUR)
        else:
            for _ in range(count):
                _value(file, inner)
        return None
    form = _SCALARS[kind]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def fingerprint(path: Path) -> str:
    """Hex of a hash over the file's size and evenly spread pieces: equal for equal files, in milliseconds."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    step = max(size // _FINGERPRINT_PIECES, _PIECE_BYTES)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:32]
