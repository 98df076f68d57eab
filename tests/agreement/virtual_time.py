"""Virtual time under asyncio: whenever nothing can be done now, the clock jumps to the next timer.

Connections to a port of this process are pairs of sockets in the kernel. What is written to one can be read from the other at
once, so that "nothing can be done now" is certain, and no computer is ever too slow. `time.monotonic` shows this clock to the
whole process: `take_over` comes before anything that reads the clock is imported, in a process of its own. What happens at one
moment in nobody's order, since some of it has come over a connection that had to be made first, is put in one by `in_turn`.
"""

import asyncio
import selectors
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor
from heapq import heappop, heappush
from itertools import count
from typing import Any

_MOMENT_S = 1e-9  # asyncio's own: what lies closer together is one moment to it

_now_s = 0.0
_order = count()
_in_turn: list[tuple[float, int, asyncio.Future[None]]] = []


def now() -> float:
    return _now_s


def take_over() -> None:
    """From now on `time.monotonic` is this clock."""
    late = [name for name, module in sys.modules.items() if name.startswith("twinpool.") and hasattr(module, "monotonic")]
    if late:
        raise RuntimeError(f"these go by the real clock already: {', '.join(late)}")
    time.monotonic = now


def in_turn(turn: float) -> asyncio.Future[None]:
    """Done at this very moment, when nothing else is left to be done in it by anybody who has not asked for a later turn."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    heappush(_in_turn, (turn, next(_order), done))
    return done


class _JumpingSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        global _now_s
        ready = super().select(0)
        if ready:
            return ready
        if _in_turn and (timeout is None or timeout > _MOMENT_S):
            _, _, done = heappop(_in_turn)
            if not done.cancelled():
                done.set_result(None)
            return []
        if timeout is None:
            raise RuntimeError("everybody waits, and for no time: nothing can ever happen again")
        _now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of `asyncio` but for the clock, the network, and threads, whose work is done on the spot."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector())
        self._ports: dict[int, Callable[[], asyncio.BaseProtocol]] = {}
        self._dialled: dict[socket.socket, int] = {}

    def time(self) -> float:
        return _now_s

    async def create_server(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        server = await super().create_server(protocol_factory, *args, **options)
        self._ports |= {listener.getsockname()[1]: protocol_factory for listener in server.sockets}
        return server

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """For who brings a socket along (aiohttp): `create_connection` puts another in its place."""
        self._dialled[sock] = address[1]

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **options: Any
    ) -> Any:
        if sock is not None:
            port = self._dialled.pop(sock)
            sock.close()
        if port not in self._ports:
            raise ConnectionRefusedError(f"nobody listens on {port}")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        await self.connect_accepted_socket(self._ports[port], theirs)
        return await super().create_connection(protocol_factory, sock=ours)

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done
