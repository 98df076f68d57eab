"""Watches how busy the workers are while a load runs, in windows of ten seconds."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from twinpool.bench.gpus import Gpus
from twinpool.bench.scrape import Page, busy_between, read_page
from twinpool.bench.target import Target, ask, complaint, message_of, target_of
from twinpool.errors import UserError
from twinpool.http1 import Pool, UpstreamLost
from twinpool.measure.indicators import WINDOW_S, Load

_LOOKS = 10
"""In a window: a share is the mean of so many moments."""

_PAGE_S = 2.0


class Watch:
    """Pages of metrics and local GPUs; `windows` grows while `run` runs. `offered` tells the tokens offered so far, for pages
    that do not say how many requests there are."""

    def __init__(self, pool: Pool, pages: Sequence[Target], gpus: Gpus | None, offered: Callable[[], float]) -> None:
        self._pool = pool
        self._pages = pages
        self._gpus = gpus
        self._offered = offered
        self.windows: list[Load] = []
        self.lost = 0
        """Looks that got no page."""

    @property
    def can_see(self) -> bool:
        return bool(self._pages or self._gpus)

    def why_unseen(self) -> str:
        """Of workers whose use is not known in the end."""
        if not self.windows:
            return f"it was over before its first window of {WINDOW_S:g} s"
        return "the metrics told nothing of it while it ran"

    async def run(self) -> None:
        """Until it is cancelled."""
        began_at, before, offered = monotonic(), await self._look(), self._offered()
        while True:
            shares: list[float] = []
            loads: list[float] = []
            for look in range(1, _LOOKS + 1):
                await asyncio.sleep(max(0.0, began_at + look * WINDOW_S / _LOOKS - monotonic()))
                now = await self._look()
                shares += self._shares(now)
                loads += [page.requests for page in now or () if page.requests is not None]
            ended_at = monotonic()
            busy = busy_between(before, now, ended_at - began_at) if before and now else None
            if busy is None and shares:
                busy = sum(shares) / len(shares)
            total = self._offered()
            load = sum(loads) / len(loads) if loads else total - offered
            self.windows.append(Load(load, busy))
            began_at, before, offered = ended_at, now, total

    def _shares(self, pages: Sequence[Page] | None) -> list[float]:
        """The moment's, one figure for all workers."""
        ratios = [ratio for page in pages or () for ratio in page.busy_ratios.values()]
        if not ratios and self._gpus is not None:
            ratios = self._gpus.busy_ratios()
        return [sum(ratios) / len(ratios)] if ratios else []

    async def _look(self) -> list[Page] | None:
        """Every page; None when one could not be had."""
        try:
            answers = [
                await self._pool.fetch(page.origin, "GET", page.base, page.credentials, timeout_s=_PAGE_S, is_idempotent=True)
                for page in self._pages
            ]
            return [read_page(answer.body.decode()) for answer in answers]
        except (UpstreamLost, ValueError):
            self.lost += 1
            return None


def page_of(url: str, service: Target | None = None) -> Target:
    """Where a metrics page is: the path as given, ``/metrics`` where none is. It gets the key of the service on whose host it
    is; another host is somebody else's."""
    target = target_of(url)
    if service is not None and target.origin.host == service.origin.host:
        target = replace(target, api_key=service.api_key)
    path = target.base.removesuffix("/v1")
    return replace(target, base=path or "/metrics")


async def look_once(pool: Pool, page: Target) -> Page:
    """A first look; `UserError` where there is no page that tells how busy workers are."""
    answer = await ask(pool, page, page.base)
    if answer.status != 200:
        raise complaint(page, answer.status, answer.headers, message_of(answer.body))
    try:
        seen = read_page(answer.body.decode())
    except ValueError:
        raise UserError(f"{page.url} is no page of Prometheus metrics") from None
    if seen.source is None:
        raise UserError(f"{page.url} does not tell how busy its workers are: Twinpool, vLLM, SGLang and DCGM's do")
    return seen


async def pages_of(pool: Pool, service: Target, given: Sequence[str]) -> tuple[list[Target], list[Page], str]:
    """The metrics pages to watch, the given ones or the service's own; what they say at first; and why there are none where
    there are none. `UserError` where a given one cannot be had."""
    if given:
        pages = [page_of(url, service) for url in given]
        return pages, [await look_once(pool, page) for page in pages], ""
    page = page_of(str(service.origin), service)
    try:
        return [page], [await look_once(pool, page)], ""
    except UserError:
        return [], [], f"{service.url} has no metrics page that tells it, and no --metrics were given"
