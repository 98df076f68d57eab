"""What has been learnt of the engines, kept for the next start: one small JSON file.

    {"format":1,"costs":{"vllm 0.32 llama tp1 budget 2048 kv 1.3e+05":{"read_token_s":...}},"prompt_lengths":{...}}

The next start takes it as its priors, by kind of worker: of another engine, model or size nothing is known, whatever the file
says of others. It is written whole or not at all, and no trouble with it keeps anybody from being served.
"""

import asyncio
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from twinpool.core.law import CostPrior

_FORMAT = 1
_EVERY_S = 60.0
_MOST_KINDS = 64
_MOST_BYTES = 1 << 20


class Learnt(msgspec.Struct, frozen=True):
    format: int = _FORMAT
    costs: dict[str, CostPrior] = {}
    prompt_lengths: dict[str, float] = {}


_DECODER = msgspec.json.Decoder(Learnt)


def read_learnt(path: Path, say: Callable[[str], None]) -> Learnt:
    """What the file has; nothing, and why, where it is none of ours."""
    try:
        with path.open("rb") as file:
            found = _DECODER.decode(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return Learnt()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as wrong:
        say(f"what was learnt before cannot be read, so it is learnt anew ({path}: {wrong})")
        return Learnt()
    if found.format != _FORMAT or not _makes_sense(found):
        say(f"what was learnt before is of no use here, so it is learnt anew ({path})")
        return Learnt()
    return found


def _makes_sense(found: Learnt) -> bool:
    figures = [value for prior in found.costs.values() for value in msgspec.structs.astuple(prior) if value is not None]
    return all(math.isfinite(value) and value >= 0 for value in (*figures, *found.prompt_lengths.values()))


def write_learnt(path: Path, learnt: Learnt) -> None:
    """Whole or not at all. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(msgspec.json.encode(learnt))
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


class LearntKeeper:
    """Writes what `now` gives (costs by kind, prompts' lengths) each minute, and at the end; kinds of earlier starts stay until
    there are too many."""

    def __init__(
        self,
        path: Path,
        before: Learnt,
        now: Callable[[], tuple[dict[str, CostPrior], dict[str, float]]],
        say: Callable[[str], None],
    ) -> None:
        self._path = path
        self._before = before
        self._now = now
        self._say = say
        self._written: Learnt | None = None
        self._is_told = False
        self._is_closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="what was learnt")

    async def close(self) -> None:
        self._is_closing.set()
        if self._task is not None:
            await self._task

    async def write(self) -> None:
        costs, prompt_lengths = self._now()
        if not costs:
            return
        older = [(kind, prior) for kind, prior in self._before.costs.items() if kind not in costs]
        learnt = Learnt(costs=dict([*older, *costs.items()][-_MOST_KINDS:]), prompt_lengths=prompt_lengths)
        if learnt == self._written:
            return
        try:
            await asyncio.to_thread(write_learnt, self._path, learnt)
            self._written = learnt
        except OSError as wrong:
            if not self._is_told:
                self._say(f"what is learnt of the engines cannot be kept for the next start: {wrong}")
            self._is_told = True

    async def _keep(self) -> None:
        while not self._is_closing.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._is_closing.wait()
            await self.write()
