"""KV that stays in use while nothing runs."""

import pytest

from twinpool.measure.leaks import LeakWatch


def looks(watch: LeakWatch, count: int, *, usage: float | None = 0.6, is_idle: bool = True, start: float = 0.0) -> list[bool]:
    return [watch.look(start + second, is_idle=is_idle, kv_usage_ratio=usage) for second in range(count)]


def test_an_idle_engine_that_keeps_its_kv_in_use_is_suspected() -> None:
    assert looks(LeakWatch(settle_s=30.0), 35) == [False] * 30 + [True] * 5


def test_a_few_looks_are_needed_however_long_apart() -> None:
    watch = LeakWatch(settle_s=30.0)
    assert [watch.look(at, is_idle=True, kv_usage_ratio=0.6) for at in (0, 100, 200, 300, 400)] == [False] * 4 + [True]


@pytest.mark.parametrize(("usage", "is_idle"), [(0.0, True), (0.01, True), (None, True), (0.6, False)])
def test_one_look_at_a_well_engine_begins_anew(usage: float | None, is_idle: bool) -> None:
    watch = LeakWatch(settle_s=30.0)
    looks(watch, 35)
    assert not watch.look(36.0, is_idle=is_idle, kv_usage_ratio=usage)
    assert looks(watch, 31, start=37.0) == [False] * 30 + [True]
