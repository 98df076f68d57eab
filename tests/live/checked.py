"""The check of a service that runs, without a command around it."""

import uvloop

from twinpool.bench.check import Asked, check_one, result_of
from twinpool.bench.target import target_of
from twinpool.config import Objectives
from twinpool.http1 import Pool

DURATION_S = 180.0
ENOUGH_LONG = 8


def interference(url: str, *, long_prompt_tokens: int) -> tuple[str, str]:
    """Whether it was found, and the advice. "Long" is to mean about a second of reading, as on engines that such prompts are
    meant for."""
    asked = Asked(objectives=Objectives(long_prompt_tokens=long_prompt_tokens), duration_s=DURATION_S)

    async def run() -> tuple[str, str]:
        pool = Pool()
        try:
            seen = await check_one(pool, target_of(url), asked, enough_long=ENOUGH_LONG, enough_windows=0)
        finally:
            await pool.close()
        result = result_of(seen, asked)
        return result["interference"]["found"], result["advice"]

    return uvloop.run(run())
