"""A process between the supervisor and an engine that is not ours: makes it behave as one of our own workers does.

    supervisor ──▶ guard ──▶ vllm serve ──▶ EngineCore, workers, …
        ready line ◀─┘ asks /health until it answers

It prints the ready line when the engine is healthy, ends the engine when the supervisor is gone, and leaves none of the
engine's processes behind, however the engine ended: one that outlives it keeps a GPU's memory. Ends as the engine ended.

    python -m twinpool.deploy.guard FD URL STOP_S COMMAND…

FD reads EOF when the supervisor is gone; STOP_S is how long an engine that was asked to end may take. One of these runs beside
every engine, so it takes nothing but the standard library.
"""

import ctypes
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

HEALTH_INTERVAL_S = 0.5  # an engine takes a minute to start
HEALTH_TIMEOUT_S = 2.0
TRACKERS_S = 3.0  # once nothing else is left: a tracker removes a handful of files
SWEEP_INTERVAL_S = 0.02
PORT_TAKEN = 98  # EADDRINUSE

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Linux's prctl(2)
_IS_LINUX = sys.platform == "linux"


def guard(alive_fd: int, url: str, stop_s: float, command: list[str]) -> int:
    """The engine's exit code, negative for a signal."""
    if _connects(url):
        _say(f"twinpool: another process answers at {url}")
        return PORT_TAKEN
    wake = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    _adopt_orphans()
    try:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), preexec_fn=_dies_with_us())  # noqa: S603
    except OSError as problem:
        _say(f"twinpool: {command[0]}: {problem.strerror}")
        return 127
    try:
        _watch(engine, url, alive_fd, wake, stop_s)
    finally:
        engine.kill()
        engine.wait()
        _sweep()
    return engine.returncode


def _watch(engine: "subprocess.Popen[bytes]", url: str, alive_fd: int, wake: int, stop_s: float) -> None:
    """Until it has ended, or has not within `stop_s` of being asked to."""
    is_ready = False
    while engine.poll() is None:
        if not is_ready and _is_healthy(url):
            is_ready = True
            print(json.dumps({"event": "ready", "url": url, "incarnation": str(engine.pid)}), flush=True)  # noqa: T201
        if _asked_to_end(alive_fd, wake, None if is_ready else HEALTH_INTERVAL_S):
            break
    engine.terminate()
    with suppress(subprocess.TimeoutExpired):
        engine.wait(stop_s)


def _asked_to_end(alive_fd: int, wake: int, patience_s: float | None) -> bool:
    """Waits for news, at most `patience_s`. The end of a child is news, and no request to end."""
    readable, _, _ = select.select([alive_fd, wake], [], [], patience_s)
    if alive_fd in readable:  # nobody writes there: its other end is closed
        return True
    came = os.read(wake, 4096) if wake in readable else b""
    return bool({signal.SIGTERM, signal.SIGINT}.intersection(came))


def _wake_on(*signals: signal.Signals) -> int:
    """A descriptor where the number of each of these is to be read when it has come."""
    reads, writes = os.pipe()
    for end in (reads, writes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    for number in signals:
        signal.signal(number, lambda *_: None)  # the byte in the pipe says it
    return reads


def _is_healthy(url: str) -> bool:
    key = os.environ.get("VLLM_API_KEY")  # not every engine answers without one, even to this
    bearer = f"Authorization: Bearer {key}\r\n" if key else ""
    with suppress(OSError), _connect(url) as connection:
        head = f"GET /health HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\n{bearer}Connection: close\r\n\r\n"
        connection.sendall(head.encode())
        return connection.recv(64).split(b" ")[1:2] == [b"200"]
    return False


def _connects(url: str) -> bool:
    with suppress(OSError), _connect(url):
        return True
    return False


def _connect(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname or "", place.port or 80), timeout=HEALTH_TIMEOUT_S)


def _adopt_orphans() -> None:
    """From here on, a process whose parent dies becomes our child, so that `_sweep` finds it wherever it hides."""
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _dies_with_us() -> Callable[[], None] | None:
    """Runs in the engine's process before the engine: even where this one is killed outright, that one is told to end."""
    if not _IS_LINUX:
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _sweep() -> None:
    """Ends all that the engine left, and what those leave in turn.

    Python's resource trackers are not killed at first: they end by themselves once the others have, and remove what those left
    in shared memory, hundreds of MB an engine.
    """
    alone_since = math.inf  # the memory of the others takes seconds to be given back, and only then a tracker begins
    while children := _children():
        others = [pid for pid in children if not _is_tracker(pid)]
        alone_since = math.inf if others else min(alone_since, time.monotonic())
        for pid in others if time.monotonic() < alone_since + TRACKERS_S else children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(SWEEP_INTERVAL_S)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _children() -> list[int]:
    """Those that have ended and were not waited for too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*") if _IS_LINUX else ():
        with suppress(OSError, ValueError):  # it ended meanwhile
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(folder.name))
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _end_like(code: int) -> None:
    """Ends this process as the engine ended: with its exit code, or by the signal that ended it."""
    if code >= 0:
        sys.exit(code)
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    _end_like(guard(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]))
