"""Processes that work for a command. They are there for its work alone: they heed no signal of the terminal, which is for the
command, and do not outlive it, however it ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait


@contextmanager
def working_processes(count: int) -> Iterator[Executor]:
    """So many, started when there is work. Whatever ends the block early ends them at once: what they compute is for nobody."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(count, initializer=_serve_the_parent)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _serve_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(0)
