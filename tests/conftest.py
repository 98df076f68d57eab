"""What tests anywhere may ask for."""

import os
from pathlib import Path

import pytest

from twinpool.worker.models import ensure_default_model, open_progress


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF: ``TWINPOOL_TEST_MODEL``, or fetched once into the user's cache.

    The first test to ask pays for the download, so those that do are marked ``model`` and may take longer.
    """
    if chosen := os.environ.get("TWINPOOL_TEST_MODEL"):
        return Path(chosen)
    with open_progress() as progress:
        return ensure_default_model(progress)
