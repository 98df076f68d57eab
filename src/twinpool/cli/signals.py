"""What Ctrl-C and SIGTERM do to a running service: the first asks it to end, the second does not ask."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def listen_for_stop(asked: asyncio.Event, on_ask: Callable[[], None], at_once: Callable[[], None]) -> None:
    """The first signal sets `asked` and calls `on_ask`; the second calls `at_once` and ends the process there and then."""

    def stop() -> None:
        if not asked.is_set():
            asked.set()
            on_ask()
            return
        at_once()
        os._exit(INTERRUPTED)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started with nohup: it is meant to outlive its terminal
        loop.add_signal_handler(number, stop)


async def first_of(*waits: Awaitable[object]) -> None:
    """Returns when one of them has ended, or raises its error; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
