"""Every asynchronous test here runs on uvloop, which serves, and some on asyncio's own loop, which others will embed."""

import asyncio
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    loops: dict[str, Any] = {"uvloop": uvloop.new_event_loop}
    if item.get_closest_marker("both_loops"):
        loops["asyncio"] = asyncio.new_event_loop
    return loops
