"""Every asynchronous test here runs on uvloop, which serves; a few run on asyncio's own loop, which others will embed."""

import asyncio
from typing import Any

import pytest
import uvloop


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "plain_loop: runs on asyncio's own loop")


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    if item.get_closest_marker("plain_loop"):
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}
