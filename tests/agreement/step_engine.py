"""The simulator's engine told a second time, as plainly as can be: one step after the other on asyncio's clock, no leaps.

A step gives each running sequence a token and fills what is left of the budget with chunks of prompts, in the order of their
coming. It begins with all that comes at its moment, the gateway's answer to the end of the step before included. What it takes
is the simulator's `StepCost`. Room for KV must be ample: there is no preemption here.
"""

import asyncio
from collections.abc import Callable
from math import inf

from tests.agreement.virtual_time import in_turn

from twinpool.sim.cost import StepCost
from twinpool.sim.engine import EngineLimits


class Sequence:
    """`on_token` is called with each token's number, from 1; `on_read` where the prompt is all that is wanted."""

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        on_token: Callable[[int], None] = lambda number: None,
        on_read: Callable[[], None] | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.on_token = on_token
        self.on_read = on_read
        self.read_tokens = 0
        self.written = 0
        self.kv_tokens = 0


class StepEngine:
    def __init__(self, cost: StepCost, limits: EngineLimits, slowness: float) -> None:
        self._cost = cost
        self._limits = limits
        self._slowness = slowness
        self._prompts: list[Sequence] = []
        self._joining: list[Sequence] = []
        self._running: list[Sequence] = []
        self._held_tokens = 0
        self._has_work = asyncio.Event()

    def submit(self, sequence: Sequence) -> None:
        self._prompts.append(sequence)
        self._has_work.set()

    def join(self, sequence: Sequence) -> None:
        """Its KV was read elsewhere and is here now."""
        self._joining.append(sequence)
        self._has_work.set()

    def free(self, tokens: int) -> None:
        """KV that was held for another engine."""
        self._held_tokens -= tokens

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            await in_turn(inf)
            chunks = self._begin()
            if not chunks and not self._running:
                self._has_work.clear()
                continue
            await asyncio.sleep(self._step_s(chunks) * self._slowness)
            self._end(chunks)

    def _begin(self) -> list[tuple[Sequence, int]]:
        for sequence in self._joining:
            sequence.kv_tokens = sequence.prompt_tokens
        self._running += self._joining
        self._joining = []
        chunks = []
        left = self._limits.budget_tokens - len(self._running)
        for sequence in self._prompts[: self._limits.sequences - len(self._running)]:
            chunk = min(left, sequence.prompt_tokens - sequence.read_tokens)
            if chunk <= 0:
                break
            chunks.append((sequence, chunk))
            left -= chunk
        used = self._held_tokens + sum(sequence.kv_tokens for sequence in self._running)
        if used + sum(sequence.prompt_tokens for sequence, _ in chunks) > self._limits.kv_tokens:
            raise RuntimeError("the KV is full: this engine knows no preemption")
        return chunks

    def _step_s(self, chunks: list[tuple[Sequence, int]]) -> float:
        batch, context = len(self._running), sum(sequence.kv_tokens for sequence in self._running)
        if not chunks:
            return self._cost.decode(batch, context)
        tokens = sum(chunk for _, chunk in chunks)
        attended = sum((sequence.read_tokens + chunk) ** 2 - sequence.read_tokens**2 for sequence, chunk in chunks)
        if not batch:
            return self._cost.prefill(tokens, attended)
        return self._cost.mixed(batch, context, tokens, attended)

    def _end(self, chunks: list[tuple[Sequence, int]]) -> None:
        wrote = self._running
        self._running = []
        for sequence in wrote:
            sequence.kv_tokens += 1
            self._write(sequence)
        for sequence, chunk in chunks:
            sequence.read_tokens += chunk
            if sequence.read_tokens < sequence.prompt_tokens:
                continue
            self._prompts.remove(sequence)
            if sequence.on_read is not None:
                self._held_tokens += sequence.prompt_tokens
                sequence.on_read()
            else:
                sequence.kv_tokens = sequence.prompt_tokens
                self._write(sequence)

    def _write(self, sequence: Sequence) -> None:
        sequence.written += 1
        if sequence.written < sequence.output_tokens:
            self._running.append(sequence)
        sequence.on_token(sequence.written)
