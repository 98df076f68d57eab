"""Small files that a person hands over: the configuration, keys, secrets. Each problem is one line that says what to do."""

import os
from pathlib import Path

from twinpool.config import BalanceMode, Config, load
from twinpool.errors import UserError

KEY_VARIABLE = "TWINPOOL_API_KEY"  # what a service under test wants to see
SHORTEST_SECRET = 16  # characters: under that a secret is a word somebody guesses


def read_config(path: Path | None, balance: BalanceMode | None = None) -> Config:
    """The defaults when there is no file. `balance` wins over the file's."""
    return load("" if path is None else _read(path, "--config"), str(path), balance)


def read_api_keys(path: Path | None) -> frozenset[str]:
    """Without a file there are no keys: all may ask."""
    if path is None:
        return frozenset()
    keys = frozenset(_keys(path))
    if not keys:
        raise UserError(f"{path} holds no key: put one on each line, or leave out --api-key-file to let everybody in")
    return keys


def read_key(path: Path | None) -> str | None:
    """The one to ask a service with: the first of the file, or the environment's."""
    if path is None:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        return _key(key, KEY_VARIABLE) if key else None
    keys = _keys(path)
    if not keys:
        raise UserError(f"{path} holds no key: put one on a line, or leave out --api-key-file")
    return keys[0]


def _keys(path: Path) -> list[str]:
    """One a line; empty lines and lines that start with # say nothing."""
    lines = (line.strip() for line in _read(path, "--api-key-file").splitlines())
    return [_key(line, path) for line in lines if line and not line.startswith("#")]


def _key(text: str, where: object) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise UserError(
            f"{where} has a key with a space, a control character or a letter beyond ASCII, which no HTTP header can carry"
        )
    return text


def read_engine_key(path: Path) -> str:
    """The one key that an engine wants to see."""
    key = _read(path, "engine_api_key_file").strip()
    if not key:
        raise UserError(f"{path} holds no key")
    return _key(key, path)


def read_secret(path: Path, option: str) -> str:
    """The file's text without the white space around it."""
    secret = _read(path, option).strip()
    if len(secret) < SHORTEST_SECRET:
        raise UserError(f"{path} is too short for a secret: openssl rand -hex 32 > {path}")
    return secret


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"no such file: {path} (given with {option})") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give {option} a file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file: give {option} another one") from None
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror} (given with {option})") from None
