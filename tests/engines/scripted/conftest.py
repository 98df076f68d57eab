"""On uvloop, which the gateway's tests run on, and on asyncio's own loop: resets, above all, are made by hand."""

import asyncio
from typing import Any

import pytest
import uvloop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
