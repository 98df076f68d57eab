"""What tests anywhere may ask for."""

import os
from pathlib import Path

import pytest

from twinpool.worker.models import ensure_default_model, open_progress


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF: ``TWINPOOL_TEST_MODEL``, or fetched once into the user's cache.

    The first test to ask pays for the download.
    """
    if chosen := os.environ.get("TWINPOOL_TEST_MODEL"):
        return Path(chosen)
    with open_progress() as progress:
        return ensure_default_model(progress)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Two idle vLLM engines keep two cores busy: whatever ran beside them would be slow, so they come last.
    items.sort(key=lambda item: item.get_closest_marker("vllm") is not None)
    for item in items:
        if item.get_closest_marker("vllm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # one of them waits for the installation and the start
        if item.get_closest_marker("model") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))  # one of them waits for the download
