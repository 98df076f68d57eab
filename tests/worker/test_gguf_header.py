"""Reading what is needed of a GGUF file, and refusing what is none."""

import struct
from pathlib import Path

import pytest

from twinpool.errors import UserError
from twinpool.worker.gguf_header import fingerprint, read_header


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, value: str | int | list[str]) -> bytes:
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return text(key) + struct.pack("<II", 4, value)
    return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))


PAIRS = [
    pair("general.architecture", "llama"),
    pair("general.tags", ["a", "b"]),
    pair("llama.block_count", 30),
    pair("llama.context_length", 8192),
    pair("llama.embedding_length", 576),
    pair("llama.attention.head_count", 9),
    pair("llama.attention.head_count_kv", 3),
    pair("tokenizer.ggml.tokens", ["x"] * 100),
]


def gguf(tmp_path: Path, pairs: list[bytes], *, cut: int | None = None, version: int = 3) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes((b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs))[:cut])
    return path


def test_context_and_kv(tmp_path: Path) -> None:
    header = read_header(gguf(tmp_path, PAIRS))
    assert (header.architecture, header.context_tokens) == ("llama", 8192)
    assert header.kv_bytes_per_token == 30 * 3 * 64 * 2 * 2


@pytest.mark.parametrize("cut", range(5, 200, 13))
def test_a_file_cut_short_is_damaged(tmp_path: Path, cut: int) -> None:
    with pytest.raises(UserError, match="damaged"):
        read_header(gguf(tmp_path, PAIRS, cut=cut))


def test_what_is_none(tmp_path: Path) -> None:
    missing, other = tmp_path / "missing.gguf", tmp_path / "other.gguf"
    other.write_text("hello")
    with pytest.raises(UserError, match=r"cannot read .*missing\.gguf.*No such file"):
        read_header(missing)
    with pytest.raises(UserError, match="not a GGUF"):
        read_header(other)
    with pytest.raises(UserError, match="version 9"):
        read_header(gguf(tmp_path, PAIRS, version=9))
    with pytest.raises(UserError, match="context length"):
        read_header(gguf(tmp_path, PAIRS[:2]))


def test_the_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    weights = bytes(range(256)) * 4096
    one.write_bytes(weights)
    same.write_bytes(weights)
    other.write_bytes(weights[:-1] + b"\0")
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
