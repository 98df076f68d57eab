"""Numbers on the command line."""

import math
from typing import Any

import click


class Number(click.FloatRange):
    """A finite number in a range. A bare `FloatRange` takes ``nan``, which is in no order to its bounds, and ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


POSITIVE = Number(0, min_open=True)
SECONDS = POSITIVE
