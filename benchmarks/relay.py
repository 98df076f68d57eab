"""What relaying a stream costs: CPU of the relaying process alone, per event and per request.

    load ══► relay ══► engine        three processes; the load and the engine are not counted

Relays, one after the other and in alternating rounds:
    http1    `twinpool.http1`: server, client and nothing between them
    splice   raw asyncio protocols on uvloop that pass bytes on without a look: what Python cannot go below
    nginx    one worker, `proxy_buffering off`, kept-alive upstreams; where it is installed

Every stream sends an event, then waits as an engine does between two steps, so that events come one by one and not in heaps
(`reads per event` tells). Streams of two lengths give two equations, for the cost of an event and of a request. Linux only:
it reads the scheduler's own account of a process, to the nanosecond.

    python benchmarks/relay.py --streams 64 --rounds 3
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import uvloop

from twinpool.http1 import Deadlines, Limits, Origin, Pool, Request, Responder, UpstreamLost, serve

EVENT = (
    b'data: {"id":"chatcmpl-6f1d0a5c9b7e4f2d","object":"chat.completion.chunk","created":1764547200,"model":"llama-3.1-70b",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
LAST = b"0\r\n\r\n"
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "word " * 200}]}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: relay\r\nAccept: application/json\r\nAccept-Encoding: gzip, deflate\r\n"
    b"User-Agent: OpenAI/Python 2.0.0\r\nAuthorization: Bearer sk-0123456789abcdef\r\nContent-Type: application/json\r\n"
    b"x-events: %d\r\nContent-Length: %d\r\n\r\n%b"
)


# The engine


class Engine(asyncio.Protocol):
    """Answers `x-events` events, one every `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.received.endswith(BODY):
            self.left = int(self.received.lower().partition(b"x-events: ")[2].partition(b"\r\n")[0])
            self.received = b""
            self.transport.write(HEAD)
            self.loop.call_later(self.interval_s, self.step)

    def step(self) -> None:
        if self.left:
            self.left -= 1
            self.transport.write(CHUNK)
            self.loop.call_later(self.interval_s, self.step)
        else:
            self.transport.write(LAST)


# The relays


class Splice(asyncio.Protocol):
    """Two of them, back to back."""

    def __init__(self, upstream_port: int | None, peer: "Splice | None" = None) -> None:
        self.upstream_port = upstream_port
        self.peer = peer
        self.held: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.upstream_port is not None:
            self.connecting = asyncio.ensure_future(self.connect(self.upstream_port))

    async def connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, self.peer = await loop.create_connection(lambda: Splice(None, self), "127.0.0.1", port)
        self.peer.transport.writelines(self.held)

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self.held.append(data)
        else:
            self.peer.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peer is not None:
            self.peer.transport.close()


class Relay:
    """The least that a relay does with an answer."""

    def __init__(self, responder: Responder) -> None:
        self.responder = responder
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_body = responder.write

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.responder.start(status, headers)

    def on_end(self) -> None:
        self.responder.finish()
        self.done.set_result(None)

    def on_lost(self, error: UpstreamLost) -> None:
        self.responder.abort()
        self.done.set_exception(error)


async def start_http1(upstream_port: int) -> int:
    pool, origin, deadlines = Pool(), Origin("127.0.0.1", upstream_port), Deadlines()

    async def handler(request: Request, responder: Responder) -> None:
        relay = Relay(responder)
        exchange = await pool.request(origin, request.method, request.target, request.headers, request.body, relay, deadlines)
        with exchange:
            responder.on_pause, responder.on_resume = exchange.pause, exchange.resume
            await relay.done

    return (await serve(handler, host="127.0.0.1", port=0, limits=Limits())).port


async def start_splice(upstream_port: int) -> int:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Splice(upstream_port), "127.0.0.1", 0, backlog=2048)
    return int(server.sockets[0].getsockname()[1])


async def start_engine(interval_s: float) -> int:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(interval_s), "127.0.0.1", 0, backlog=2048)
    return int(server.sockets[0].getsockname()[1])


async def run_child(kind: str, argument: str) -> None:
    starts = {"http1": start_http1, "splice": start_splice}
    port = await (start_engine(float(argument)) if kind == "engine" else starts[kind](int(argument)))
    print(port, flush=True)
    await asyncio.get_running_loop().create_future()


NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; keepalive_requests 1000000;
  upstream engine {{ server 127.0.0.1:{upstream}; keepalive 1024; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port}; client_body_buffer_size 1m;
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""


# The load


class Client(asyncio.Protocol):
    """Asks again and again on one connection."""

    def __init__(self, load: "Load") -> None:
        self.load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        self.end = b""
        self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        self.load.reads += 1
        self.end = (self.end + data)[-5:]
        if self.end == LAST:
            self.load.requests += 1
            if self.load.is_over():
                self.transport.close()
            else:
                self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.lost()


class Load:
    """Streams at once, until so many requests have been answered."""

    def __init__(self, port: int, streams: int, events: int, requests: int) -> None:
        self.port, self.streams, self.events, self.wanted = port, streams, events, requests
        self.request = REQUEST % (events, len(BODY), BODY)
        self.requests = self.reads = self.closed = 0

    def is_over(self) -> bool:
        return self.requests + self.streams > self.wanted + self.closed

    def lost(self) -> None:
        self.closed += 1
        if self.closed == self.streams:
            self.done.set()

    async def run(self) -> None:
        self.done = asyncio.Event()
        loop = asyncio.get_running_loop()
        for _ in range(self.streams):
            await loop.create_connection(lambda: Client(self), "127.0.0.1", self.port)
        await self.done.wait()


def cpu_s(pid: int) -> float:
    """What a process and its children have used."""
    spent = sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        spent += sum(cpu_s(int(child)) for child in children.read_text().split())
    return spent


def spawn(kind: str, argument: str) -> tuple["subprocess.Popen[str]", int]:
    command = [sys.executable, __file__, "--child", kind, argument]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline() if process.stdout else ""
    return process, int(line)


def spawn_nginx(nginx: str, upstream_port: int, folder: str) -> tuple["subprocess.Popen[str]", int]:
    port = 20000 + os.getpid() % 20000
    config = Path(folder) / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, upstream=upstream_port))
    process = subprocess.Popen([nginx, "-p", folder, "-c", str(config)], text=True)
    time.sleep(0.5)
    return process, port


def measure(pid: int, port: int, streams: int, events: int, requests: int) -> tuple[float, Load]:
    before = cpu_s(pid)
    load = Load(port, streams, events, requests)
    uvloop.run(load.run())
    return cpu_s(pid) - before, load


def one_round(pid: int, port: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Solves `cpu = requests · r + events · e` for streams of two lengths."""
    few, many = 1, arguments.events
    short_s, short = measure(pid, port, arguments.streams, few, arguments.requests * 8)
    long_s, long = measure(pid, port, arguments.streams, many, arguments.requests)
    a, b = short_s / short.requests, long_s / long.requests
    event_s = (b - a) / (many - few)
    return {
        "event_us": event_s * 1e6,
        "request_us": (a - few * event_s) * 1e6,
        "reads_per_event": long.reads / (long.requests * many),
    }


def run(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        engine, upstream_port = spawn("engine", str(arguments.interval_s))
        relays = {kind: spawn(kind, str(upstream_port)) for kind in ("http1", "splice")}
        if nginx := shutil.which("nginx"):
            relays["nginx"] = spawn_nginx(nginx, upstream_port, folder)
        try:
            for process, port in relays.values():  # warm
                measure(process.pid, port, arguments.streams, 4, arguments.streams * 2)
            rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in relays}
            for _ in range(arguments.rounds):
                for kind, (process, port) in relays.items():
                    rounds[kind].append(one_round(process.pid, port, arguments))
        finally:
            for process in [engine, *(process for process, _ in relays.values())]:
                process.send_signal(signal.SIGTERM)
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
    return {
        kind: {key: statistics.median(one[key] for one in measured) for key in measured[0]} for kind, measured in rounds.items()
    }


def show(results: dict[str, dict[str, float]]) -> None:
    base = results["splice"]
    print(f"{'relay':8} {'µs/event':>9} {'ratio':>6} {'µs/request':>11} {'reads/event':>12}")
    for kind, result in results.items():
        ratio = result["event_us"] / base["event_us"]
        print(f"{kind:8} {result['event_us']:9.2f} {ratio:6.2f} {result['request_us']:11.1f} {result['reads_per_event']:12.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--events", type=int, default=128, help="of the long streams")
    parser.add_argument("--requests", type=int, default=256, help="long streams a round; of the short ones eight times that")
    parser.add_argument("--interval-s", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        uvloop.run(run_child(*arguments.child))
        return
    results: dict[str, Any] = run(arguments)
    if arguments.json:
        print(json.dumps(results))
    else:
        show(results)


if __name__ == "__main__":
    main()
