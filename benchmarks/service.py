"""Starts real workers and a gateway in front of them, for the measurements; everything ends with the `with` block."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_TWINPOOL = (sys.executable, "-m", "twinpool")


@contextlib.contextmanager
def worker(*, core: int, batch_tokens: int, slots: int, secret_file: str) -> Iterator[str]:
    """One embedded worker on one core; gives its URL."""
    options = ["--port", "0", "--cores", str(core), "--batch-tokens", str(batch_tokens), "--slots", str(slots)]
    with _process("worker", *options, "--handoff-secret-file", secret_file) as process:
        yield _first_line(process)["url"]


@contextlib.contextmanager
def gateway(**workers: list[str]) -> Iterator[str]:
    """A gateway in front of `prefill`, `decode` and `colocated` URLs; gives its own."""
    options = [option for role, urls in workers.items() for url in urls for option in (f"--{role}", url)]
    with _process("serve", "--json", "--port", "0", "--admin-port", "0", "--expose-route", *options) as process:
        yield _first_line(process)["gateway"]["url"]


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([*_TWINPOOL, *arguments], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()


def _first_line(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    if process.stdout is None or not (line := process.stdout.readline()):
        raise SystemExit(f"it did not start: {process.args!r}")
    found: dict[str, Any] = json.loads(line)
    return found
