"""A scripted engine as a process of its own, for commands that are processes, too."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests


@contextmanager
def scripted_process(**script: Any) -> Iterator[str]:
    """Gives its URL. `script` is what `Script` has, in JSON."""
    argv = [sys.executable, "-m", "twinpool.engines.scripted"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = str(json.loads(process.stdout.readline())["url"])
            if script:
                order(url, script)
            yield url
        finally:
            process.terminate()


def order(url: str, script: dict[str, Any]) -> None:
    """Change its script."""
    assert requests.post(f"{url}/script", json=script, timeout=10).status_code == 200
