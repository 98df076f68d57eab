"""A TCP relay before an engine, which can hold back the requests that carry a handle: a slow network between the two legs.

Everything else (probes, prefills, answers) passes as it comes. ::

    router ──decode leg──► relay ···held until `let_go`···► engine
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HANDLE = b'"do_remote_prefill":true'
"""What a decode leg has in its body and a prefill leg has not; spaces are looked past."""


class Relay:
    """Listens on a port of its own; `url` is what to attach in place of the engine's."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self.held = 0
        """Decode legs that have come so far and were held back."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold(self) -> None:
        """Keep decode legs back until `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in `accept`
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._target, timeout=5) as engine:
            engine.settimeout(None)
            answers = threading.Thread(target=self._pass_on, args=(engine, client), daemon=True)
            answers.start()
            self._pass_on(client, engine, is_request=True)
            answers.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket, *, is_request: bool = False) -> None:
        before = b""
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_request:
                    seen = (before + data).replace(b" ", b"")
                    before = seen[-len(HANDLE) + 1 :]
                    if HANDLE in seen:
                        # All but a byte: an engine closes a connection on which nothing has begun for some seconds.
                        sink.sendall(data[:-1])
                        data = data[-1:]
                        if not self._wait(source):
                            break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait(self, source: socket.socket) -> bool:
        """Whether the leg may go on: not when whoever sent it has gone meanwhile."""
        if self._open.is_set():
            return True
        self.held += 1
        self._open.wait()
        source.setblocking(False)
        try:
            return source.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        finally:
            source.setblocking(True)


@contextmanager
def relay(port: int) -> Iterator[Relay]:
    """Before the engine at that port of this machine, until the end of the block."""
    between = Relay(port)
    try:
        yield between
    finally:
        between.close()
