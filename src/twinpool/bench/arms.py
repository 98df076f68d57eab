"""The arms of a comparison: the same workers behind gateways that use them differently. Every process is one of ours, started
by its command line as a person would, and ends with the block, or with this process, however that ends."""

import asyncio
import json
import os
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from twinpool.errors import UserError

ARMS = ("colocated", "disaggregated", "balanced")
_START_S = 120.0  # a large model's weights are read from a disk
_END_S = 10.0
_TWINPOOL = (sys.executable, "-m", "twinpool")


@dataclass(frozen=True, slots=True)
class Workers:
    """Engines that run: their URLs, in the order of their cores."""

    urls: tuple[str, ...]
    cores: tuple[str, ...]
    """What each is bound to; empty for engines that were given."""
    api_key: str | None = field(default=None, repr=False)
    """What they want to see."""


@dataclass(frozen=True, slots=True)
class Split:
    """How many of the workers read prompts; the rest write tokens."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


def splits(workers: int) -> list[Split]:
    return [Split(prefill, workers - prefill) for prefill in range(1, workers)]


@asynccontextmanager
async def embedded_workers(count: int, *, options: Sequence[str], secret: Path) -> AsyncIterator[Workers]:
    """So many `twinpool worker`s, bound to the cores in turn: more workers than cores share some."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    async with AsyncExitStack() as stack:
        urls, bound = [], []
        for number in range(count):
            binding = ["--cores", str(cores[number % len(cores)])] if cores else []
            argv = ["worker", "--port", "0", *binding, "--handoff-secret-file", str(secret), *options]
            said = await stack.enter_async_context(_process(argv))
            urls.append(str(said["url"]))
            bound.append(str(cores[number % len(cores)]) if cores else "any")
        yield Workers(tuple(urls), tuple(bound))


@asynccontextmanager
async def gateway(arm: str, workers: Workers, split: Split, extra: Mapping[str, Sequence[str]]) -> AsyncIterator[str]:
    """A gateway in front of the workers, in that arm's way; gives its URL. `extra` has more options of `serve` for an arm.

    The balanced arm begins with the split, and every worker may take every role.
    """
    roles = ["prefill"] * split.prefill + ["decode"] * split.decode
    free = arm == "balanced"
    tables = [
        "[[workers]]\n"
        f'url = "{url}"\n'
        f'role = "{"colocated" if arm == "colocated" else role}"\n'
        + ('allowed_roles = ["prefill", "decode", "colocated"]\n' if free else "")
        for url, role in zip(workers.urls, roles, strict=True)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config, tempfile.NamedTemporaryFile("w", suffix=".key") as key:
        argv = ["serve", "--json", "--port", "0", "--admin-port", "0", "--expose-route", "--config", config.name]
        config.write("\n".join(tables))
        config.flush()
        if workers.api_key is not None:
            key.write(workers.api_key)
            key.flush()
            argv += ["--engine-api-key-file", key.name]
        async with _process([*argv, *extra.get(arm, ())]) as said:
            yield str(said["gateway"]["url"])


@asynccontextmanager
async def _process(arguments: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """One of our commands; gives the JSON line that it prints when it is ready. `UserError` where it never is."""
    reads, writes = os.pipe()  # what is left open here ends with us
    with tempfile.TemporaryFile() as errors, os.fdopen(writes, "wb"):
        argv = (*_TWINPOOL, *arguments, "--exit-with-fd", str(reads))
        try:
            process = await asyncio.create_subprocess_exec(*argv, stdin=DEVNULL, stdout=PIPE, stderr=errors, pass_fds=(reads,))
        finally:
            os.close(reads)
        try:
            line = await _first_line(process)
            if not line:
                errors.seek(0)
                words = errors.read().decode(errors="replace").strip().splitlines()
                raise UserError(f"twinpool {arguments[0]} did not start{f': {words[-1]}' if words else ''}")
            yield json.loads(line)
        finally:
            await _end(process)


async def _first_line(process: Process) -> bytes:
    if process.stdout is None:
        return b""
    try:
        async with asyncio.timeout(_START_S):
            return await process.stdout.readline()
    except TimeoutError:
        return b""


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
