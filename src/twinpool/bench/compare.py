"""The same workers, flags and traffic in three arms, in alternating rounds; and what follows from it, in words.

    tune ──► round 1: colocated, disaggregated, balanced ──► round 2: balanced, colocated, disaggregated ──► … ──► compared

Each round offers every arm the same requests at the same times (with prompts of its own). The order moves on from round to
round, so that a machine that gets slower does not do it to one arm.
"""

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from twinpool.bench.arms import ARMS, Split, Workers, embedded_workers, gateway, splits
from twinpool.bench.compared import BATCHES, BURST_REQUESTS, LONG_REQUESTS, Found, Settings, rounds_of, summary
from twinpool.bench.load import Progress
from twinpool.bench.prepare import Prepared, prepare
from twinpool.bench.run import Measured, offer
from twinpool.bench.target import ask, find_model, target_of
from twinpool.bench.tune import Burst, best, burst, unit_costs
from twinpool.bench.use import Watch, page_of
from twinpool.bench.words import seconds
from twinpool.errors import UserError
from twinpool.http1 import Pool
from twinpool.workload.arrivals import Poisson
from twinpool.workload.offered import Offered, offered, scaled

_COUNTED_SHARE = 0.85  # of the time, after the warm-up rule
_MARGIN = 1.25  # a Poisson number is not its mean
_SCALES = (1, 2, 4, 8, 10, 16, 20, 32)
"""Beyond these no length is left to speak of: then it takes longer than was asked."""
_ASIDE_S = 150.0  # for tuning, starts and ends
_TIMEOUT_S = 300.0
_SLOTS = 8


Say = Callable[[str], None]


class Comparison:
    """One comparison. `say` gets a sentence at each step, `show` the progress of a load."""

    def __init__(self, settings: Settings, secret: Path, say: Say, show: Callable[[Progress], None] | None) -> None:
        self._settings = settings
        self._secret = secret
        self._say = say
        self._show = show
        self._found = Found()

    async def run(self) -> dict[str, Any]:
        settings = self._settings
        if (len(settings.engines) or settings.workers) < 2:
            raise UserError("a comparison takes at least 2 workers: one reads, one writes")
        async with AsyncExitStack() as stack:
            workers = await self._tuned(stack)
            await self._play_rounds(workers)
            return summary(settings, self._found, workers)

    # Tuning

    async def _tuned(self, stack: AsyncExitStack) -> Workers:
        """The workers to compare with, at the colocated arm's best batch size; rate, lengths and split are found with them."""
        if self._settings.engines:
            workers = Workers(self._settings.engines, (), self._settings.api_key)
            await self._ask_each(workers)
            await self._learn_scale(workers)
            bursts = {0: await self._burst(workers, "colocated", Split(0, len(workers.urls)))}
        else:
            workers = await self._best_batch(stack)
            bursts = self._batch_bursts
        capacity = max(found.requests_per_s for found in bursts.values())
        if not capacity:
            raise UserError("the workers answered none of the first requests: see twinpool bench for what they say")
        self._found.rate = self._settings.rate or round(self._settings.load * capacity, 3)
        self._found.duration_s = self._settings.duration_s or self._long_enough()
        self._found.split = self._settings.split or await self._best_split(workers)
        return workers

    async def _ask_each(self, workers: Workers) -> None:
        """What is wrong with one is said now, in its own words: a gateway would wait for it."""
        pool = Pool()
        try:
            for url in workers.urls:
                await find_model(pool, target_of(url, api_key=workers.api_key), self._settings.model)
        finally:
            await pool.close()

    async def _best_batch(self, stack: AsyncExitStack) -> Workers:
        """Starts the workers with each batch size; those with the best one run on."""
        self._batch_bursts: dict[int, Burst] = {}
        sizes = [None] if "--batch-tokens" in self._settings.worker_options else list(BATCHES)
        for batch in sizes:
            async with self._workers(batch) as workers:
                if batch in (None, sizes[0]):
                    await self._learn_scale(workers)
                    await self._learn_costs(workers)
                found = await self._burst(workers, "colocated", Split(0, len(workers.urls)))
                self._batch_bursts[batch or 0] = found
                self._note_burst(f"colocated, {batch} tokens a step" if batch else "colocated", found)
        chosen = best(self._batch_bursts)
        self._found.batch_tokens = chosen or None
        if chosen:
            self._say(f"colocated is best with {chosen} tokens a step: all arms run with that")
        return await stack.enter_async_context(self._workers(chosen or None))

    async def _best_split(self, workers: Workers) -> Split:
        found: dict[Split, Burst] = {}
        for split in splits(len(workers.urls)):
            found[split] = await self._burst(workers, "disaggregated", split)
            self._note_burst(f"disaggregated, {split} (prefill:decode)", found[split])
        return best(found)

    async def _learn_scale(self, workers: Workers) -> None:
        """Divide the lengths as little as lets every arm get its long requests in the time there is."""
        settings, found = self._settings, self._found
        if settings.scale_lengths is not None:
            found.scale = settings.scale_lengths
            return
        if settings.duration_s is not None and settings.rate is not None:
            return
        pool = Pool()
        try:
            prepared = await self._prepared(pool, workers.urls[0])
            costs = await unit_costs(pool, prepared, slots=1, timeout_s=_TIMEOUT_S)
        finally:
            await pool.close()
        if costs is None:
            return
        drawn = list(self._drawn(rate=100.0, duration_s=5.0, seed=settings.seed))
        work_s = sum(
            costs.prefill_s_per_token * one.prompt_tokens + costs.decode_s_per_token * one.output_tokens for one in drawn
        ) / len(drawn)
        long_share = sum(one.is_long for one in drawn) / len(drawn) or 1.0
        able = min(len(workers.urls), len(set(workers.cores)) or len(workers.urls))
        needed = LONG_REQUESTS * _MARGIN / long_share / _COUNTED_SHARE * len(ARMS)
        seconds_there = settings.minutes * 60 - _ASIDE_S
        for scale in _SCALES:
            found.scale = scale
            if needed * work_s / scale / able / settings.load <= seconds_there:
                return
        self._say(f"even with lengths divided by {found.scale:g} this takes longer than {settings.minutes:g} minutes")

    async def _learn_costs(self, workers: Workers) -> None:
        pool = Pool()
        try:
            prepared = await self._prepared(pool, workers.urls[0])
            self._found.costs = await unit_costs(pool, prepared, slots=_SLOTS, timeout_s=_TIMEOUT_S)
        finally:
            await pool.close()

    def _long_enough(self) -> float:
        """Seconds a round, so that each arm counts enough long requests over all rounds."""
        drawn = list(self._drawn(rate=100.0, duration_s=5.0, seed=self._settings.seed))
        long_share = sum(one.is_long for one in drawn) / len(drawn)
        if not long_share:
            return 60.0
        total_s = LONG_REQUESTS * _MARGIN / long_share / self._found.rate / _COUNTED_SHARE
        return float(max(20, round(total_s / self._settings.rounds)))

    async def _burst(self, workers: Workers, arm: str, split: Split) -> Burst:
        rng_seed = self._settings.seed + 10_000
        drawn = list(self._drawn(rate=100.0, duration_s=10.0, seed=rng_seed))[:BURST_REQUESTS]
        pool = Pool()
        try:
            async with gateway(arm, workers, split, self._settings.arm_options) as url:
                return await burst(pool, await self._prepared(pool, url), drawn, timeout_s=_TIMEOUT_S)
        finally:
            await pool.close()

    def _note_burst(self, name: str, found: Burst) -> None:
        failed = f", {found.failed} failed" if found.failed else ""
        said = (
            f"{name}: {found.requests_per_s:.2f} requests/s of a burst of {BURST_REQUESTS}, "
            f"worst gap p99 {seconds(found.worst_gap_p99_s)}{failed}"
        )
        self._found.tuning.append(said)
        self._say(said)

    # Rounds

    async def _play_rounds(self, workers: Workers) -> None:
        found = self._found
        self._say(
            f"{found.rate:g} requests a second, lengths divided by {found.scale:g}, split {found.split}: "
            f"{rounds_of(self._settings.rounds)} of {found.duration_s:.0f} s an arm"
        )
        for number in range(self._settings.rounds):
            for arm in order(number):
                self._say(f"round {number + 1} of {self._settings.rounds}: {arm}")
                found.rounds[arm].append(await self._play(workers, arm, number))

    async def _play(self, workers: Workers, arm: str, number: int) -> Measured:
        pool, found = Pool(), self._found
        requests = self._drawn(rate=found.rate, duration_s=found.duration_s, seed=self._settings.seed + number)
        pages = [] if self._settings.engines else [page_of(url) for url in workers.urls]
        try:
            async with gateway(arm, workers, found.split, self._settings.arm_options) as url:
                prepared = await self._prepared(pool, url)
                found.notes += [note for note in prepared.notes if note not in found.notes]
                measured = await offer(
                    pool,
                    prepared,
                    requests,
                    duration_s=found.duration_s,
                    timeout_s=_TIMEOUT_S,
                    objectives=self._settings.objectives,
                    watch=(lambda offered: Watch(pool, pages, None, offered)) if pages else None,
                    show=self._show,
                    long_tokens=self._settings.objectives.long_prompt_tokens / found.scale,
                )
                if arm == "balanced":
                    found.role_changes += await role_changes(pool, url)
                return measured
        finally:
            await pool.close()

    async def _prepared(self, pool: Pool, url: str) -> Prepared:
        target = target_of(url, api_key=self._settings.api_key, is_chat=False)
        return await prepare(pool, target, self._settings.model, timeout_s=_TIMEOUT_S)

    def _workers(self, batch_tokens: int | None) -> Any:
        batch = ("--batch-tokens", str(batch_tokens)) if batch_tokens else ()
        options = ("--slots", str(_SLOTS), *batch, *self._settings.worker_options)
        return embedded_workers(self._settings.workers, options=options, secret=self._secret)

    def _drawn(self, *, rate: float, duration_s: float, seed: int) -> Iterator[Offered]:
        settings = self._settings
        drawn = offered(
            Poisson(rate=rate),
            settings.traffic,
            Random(seed),  # noqa: S311  # repeatable, not secret
            duration_s=duration_s,
            long_prompt_tokens=settings.objectives.long_prompt_tokens,
        )
        return scaled(drawn, lengths=self._found.scale)


async def role_changes(pool: Pool, gateway_url: str) -> int:
    """How many workers a gateway has moved, by its metrics page."""
    page = page_of(gateway_url)
    answer = await ask(pool, page, page.base)
    families = text_string_to_metric_families(answer.body.decode())
    name = "twinpool_role_changes_total"
    return round(sum(sample.value for family in families for sample in family.samples if sample.name == name))


def order(number: int) -> list[str]:
    """Of the arms in a round: each round begins with another."""
    first = number % len(ARMS)
    return [*ARMS[-first:], *ARMS[:-first]] if first else list(ARMS)


async def compare(settings: Settings, secret: Path, say: Say, show: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Run it all."""
    return await Comparison(settings, secret, say, show).run()
