"""What an engine may answer, and what its receiver hears."""

import asyncio
import gc
import re
import socket
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinpool.http1 import Deadlines, Exchange, Limits, Loss, Origin, Pool, Request, Responder, UpstreamLost, serve
from twinpool.http1.engine_connection import EngineConnection

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Heard:
    """A receiver that remembers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.done: asyncio.Future[UpstreamLost | None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.calls.append("head")
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self.calls.append("body")
        self.pieces.append(data)

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def on_end(self) -> None:
        self.calls.append("end")
        self.done.set_result(None)

    def on_lost(self, error: UpstreamLost) -> None:
        self.calls.append("lost")
        self.done.set_result(error)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


async def ask(pool: Pool, port: int, deadlines: Deadlines | None = None, *, body: bytes = b"{}") -> tuple[Exchange, Heard]:
    heard = Heard()
    exchange = await pool.request(
        Origin("127.0.0.1", port), "POST", "/x", [(b"x-own", b"1")], body, heard, deadlines or Deadlines()
    )
    return exchange, heard


def answers(*parts: bytes, then: str = "wait"):
    """An engine that answers each request with those bytes."""

    async def script(count: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for part in parts:
                writer.write(part)
                await writer.drain()
            if then == "close":
                return
            if then == "reset":
                await asyncio.sleep(0.01)  # what was written has to be there before the reset
                writer.transport.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")
                return

    return script


async def test_a_request_as_the_engine_sees_it(pool, engine):
    seen = []

    async def script(count, reader, writer):
        seen.append(await read_request(reader))
        writer.write(OK)

    port = await engine(script)
    headers = [(b"x-own", b"1"), (b"host", b"evil"), (b"content-length", b"9"), (b"connection", b"close"), (b"expect", b"x")]
    response = await pool.fetch(Origin("127.0.0.1", port), "POST", "/x?y=1", headers, b"body", timeout_s=5)
    assert (response.status, response.body) == (200, b"ok")
    head, body = seen[0]
    assert head == b"POST /x?y=1 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-own: 1\r\ncontent-length: 4\r\n\r\n" % port
    assert body == b"body"


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [("GET", "/a b", []), ("GET", "/\r\nx: y", []), ("G T", "/", []), ("GET", "/", [(b"x", b"a\r\nb: c")])],
)
async def test_a_request_cannot_be_split(pool, method, target, headers):
    with pytest.raises(ValueError, match=r"request line|line break"):
        await pool.fetch(Origin("127.0.0.1", 1), method, target, headers, timeout_s=5)


async def test_connections_are_used_again(pool, engine, until):
    counts = set()

    async def script(count, reader, writer):
        counts.add(count)
        while True:
            await read_request(reader)
            writer.write(OK)

    port = await engine(script)
    exchanges = []
    for _ in range(3):
        exchange, heard = await ask(pool, port)
        assert await heard.done is None
        exchanges.append(exchange)
        await until(lambda: pool.idle_connections == 1)
        exchange.abort()  # of an exchange that is over: hurts nobody
    assert counts == {1}
    assert [exchange.is_reused for exchange in exchanges] == [False, True, True]


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    ],
)
async def test_answers_after_which_the_connection_is_kept(pool, engine, until, answer, body):
    port = await engine(answers(answer))
    for _ in range(2):
        _, heard = await ask(pool, port)
        assert await heard.done is None
        assert heard.body == body
        assert heard.calls.count("head") == heard.calls.count("end") == 1
        assert all(name == name.lower() for name, _ in heard.headers)
    await until(lambda: pool.idle_connections == 1)


@pytest.mark.parametrize(
    ("answer", "then"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nok", "close"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "wait"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", "wait"),
        (OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", "wait"),  # an answer nobody asked for
        (OK + b"rubbish", "wait"),
    ],
)
async def test_answers_after_which_it_is_not(pool, engine, until, answer, then):
    port = await engine(answers(answer, then=then))
    _, heard = await ask(pool, port)
    assert await heard.done is None
    assert heard.body == b"ok"
    await until(lambda: pool.connections == 0)


async def test_bytes_on_an_idle_connection_end_it(pool, engine, until):
    go_on = asyncio.Event()

    async def script(count, reader, writer):
        await read_request(reader)
        writer.write(OK)
        await go_on.wait()
        writer.write(OK)
        await reader.read()

    port = await engine(script)
    _, heard = await ask(pool, port)
    await heard.done
    await until(lambda: pool.idle_connections == 1)
    go_on.set()
    await until(lambda: pool.connections == 0)


async def test_head_requests(pool, engine):
    port = await engine(answers(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"))
    response = await pool.fetch(Origin("127.0.0.1", port), "HEAD", "/", timeout_s=5)
    assert (response.status, response.body) == (200, b"")


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
SHORT = Deadlines(first_byte_s=0.05, idle_s=0.05)


@pytest.mark.parametrize(
    ("parts", "then", "loss"),
    [
        ((b"",), "close", Loss.CLOSED_BEFORE_HEAD),
        ((b"",), "reset", Loss.CLOSED_BEFORE_HEAD),
        ((b"HTTP/1.1 200 OK\r\nCont",), "close", Loss.CLOSED_BEFORE_HEAD),
        ((HEAD + b"ok",), "close", Loss.TRUNCATED),
        ((CHUNKED,), "close", Loss.TRUNCATED),
        ((HEAD + b"ok",), "reset", Loss.RESET_MID_BODY),
        ((CHUNKED,), "reset", Loss.RESET_MID_BODY),
        ((b"HTTP/1.1 200 OK\r\n\r\nok",), "reset", Loss.RESET_MID_BODY),
        ((b"",), "wait", Loss.HEAD_TIMEOUT),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), "wait", Loss.HEAD_TIMEOUT),
        ((CHUNKED,), "wait", Loss.IDLE_TIMEOUT),
        ((b"SMTP ready\r\n",), "wait", Loss.PROTOCOL),
        ((CHUNKED + b"zz\r\n",), "wait", Loss.PROTOCOL),
        ((b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",), "wait", Loss.PROTOCOL),
        ((b"HTTP/1.1 200 OK\r\nX: " + b"a" * 400_000, b"b" * 400_000), "wait", Loss.PROTOCOL),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",), "wait", Loss.PROTOCOL),
    ],
)
async def test_losses(pool, engine, until, parts, then, loss):
    port = await engine(answers(*parts, then=then))
    exchange, heard = await ask(pool, port, SHORT)
    error = await asyncio.wait_for(heard.done, 5)
    assert error is not None
    assert error.loss is loss
    assert error.is_timeout == (then == "wait" and loss is not Loss.PROTOCOL)
    assert error.may_have_arrived
    assert heard.calls.count("lost") == 1
    assert heard.calls[-1] == "lost"
    assert exchange.is_over
    await until(lambda: pool.connections == 0)


async def test_nobody_listens(pool):
    with pytest.raises(UpstreamLost, match=r"refused|Connect") as caught:
        await ask(pool, 1)
    assert caught.value.loss is Loss.CONNECT
    assert not caught.value.may_have_arrived


async def test_connecting_has_a_deadline(pool, stack):
    # a full backlog: the kernel drops what comes beyond it
    sock = stack.enter_context(socket.socket())
    sock.bind(("127.0.0.1", 0))
    sock.listen(0)

    async def fill() -> None:
        for _ in range(6):
            exchange, _ = await ask(pool, sock.getsockname()[1], Deadlines(connect_s=0.05))
            stack.callback(exchange.abort)

    with pytest.raises(UpstreamLost) as caught:
        await fill()
    assert caught.value.loss is Loss.CONNECT_TIMEOUT
    assert not caught.value.may_have_arrived


async def test_idle_time_is_counted_from_the_last_byte(pool, engine):
    async def script(count, reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(15):
            await asyncio.sleep(0.02)
            writer.write(b"1\r\nx\r\n")
        writer.write(b"0\r\n\r\n")

    port = await engine(script)
    _, heard = await ask(pool, port, Deadlines(first_byte_s=0.2, idle_s=0.2))
    assert await heard.done is None
    assert len(heard.body) == 15


async def test_a_stale_connection_is_not_used_for_what_must_not_be_done_twice(pool, engine, until):
    requests = 0

    async def script(count, reader, writer):
        nonlocal requests
        await read_request(reader)
        requests += 1
        writer.write(OK)
        if count == 1:
            await read_request(reader)  # closes at the moment it is used again
            requests += 1
            return
        await reader.read()

    port = await engine(script)
    origin = Origin("127.0.0.1", port)
    _, heard = await ask(pool, port)
    await heard.done
    await until(lambda: pool.idle_connections == 1)
    with pytest.raises(UpstreamLost) as caught:
        await pool.fetch(origin, "POST", "/", body=b"once", timeout_s=5)
    assert caught.value.loss is Loss.CLOSED_BEFORE_HEAD
    assert caught.value.is_reused
    assert requests == 2


async def test_what_may_be_done_twice_is_tried_again_on_a_new_connection(pool, engine, until):
    seen = []

    async def script(count, reader, writer):
        seen.append((count, (await read_request(reader))[1]))
        writer.write(OK)
        if count == 1:
            seen.append((count, (await read_request(reader))[1]))
            return
        await reader.read()

    port = await engine(script)
    origin = Origin("127.0.0.1", port)
    for body in (b"a", b"b"):
        response = await pool.fetch(origin, "POST", "/", body=body, timeout_s=5, is_idempotent=True)
        assert response.body == b"ok"
        await until(lambda: pool.idle_connections == 1)
    assert seen == [(1, b"a"), (1, b"b"), (2, b"b")]


async def test_a_new_connection_that_is_closed_is_not_tried_again(pool, engine):
    counts = []

    async def script(count, reader, writer):
        counts.append(count)
        await read_request(reader)

    port = await engine(script)
    with pytest.raises(UpstreamLost):
        await pool.fetch(Origin("127.0.0.1", port), "POST", "/", timeout_s=5, is_idempotent=True)
    assert counts == [1]


async def test_fresh_means_a_new_connection(pool, engine, until):
    counts = set()

    async def script(count, reader, writer):
        counts.add(count)
        while True:
            await read_request(reader)
            writer.write(OK)

    port = await engine(script)
    for _ in range(2):
        heard = Heard()
        await pool.request(Origin("127.0.0.1", port), "POST", "/", (), b"", heard, is_fresh=True)
        await heard.done
        await until(lambda: pool.idle_connections == len(counts))
    assert counts == {1, 2}


async def test_old_connections_are_closed(engine, until, stack):
    pool = Pool(keep_alive_s=0.04)
    stack.push_async_callback(pool.close)
    port = await engine(answers(OK))
    _, heard = await ask(pool, port)
    await heard.done
    await until(lambda: pool.idle_connections == 1)
    await until(lambda: pool.connections == 0)


async def test_a_connection_that_rested_too_long_is_not_used_again(pool, engine, until):
    port = await engine(answers(OK))
    _, heard = await ask(pool, port)
    await heard.done
    await until(lambda: pool.idle_connections == 1)
    next(iter(pool._idle[Origin("127.0.0.1", port)])).idle_since -= 60  # before the timer has come round to it
    exchange, heard = await ask(pool, port)
    assert not exchange.is_reused
    assert await heard.done is None
    await until(lambda: pool.connections == 1)


async def test_no_more_idle_connections_than_asked_for(engine, until, stack):
    pool = Pool(max_idle_per_origin=2)
    stack.push_async_callback(pool.close)
    port = await engine(answers(OK))
    asked = [await ask(pool, port) for _ in range(5)]
    for _, heard in asked:
        await heard.done
    await until(lambda: pool.connections == pool.idle_connections == 2)


@pytest.mark.parametrize("moment", ["connecting", "waiting", "reading"])
async def test_cancelling_closes_the_socket(pool, engine, until, moment):
    left = []
    reached = asyncio.Event()

    async def script(count, reader, writer):
        await read_request(reader)
        if moment == "reading":
            writer.write(CHUNKED)
        reached.set()
        assert await reader.read() == b""
        left.append(True)

    port = await engine(script)
    task = asyncio.create_task(pool.fetch(Origin("127.0.0.1", port), "POST", "/", timeout_s=60))
    if moment == "connecting":
        await asyncio.sleep(0)
    else:
        await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: pool.connections == 0)
    if moment != "connecting":
        await until(lambda: left)


@pytest.mark.parametrize("moment", ["on_head", "on_body", "later"])
async def test_after_abort_nothing_is_heard(pool, engine, until, moment):
    class Quitter(Heard):
        def on_head(self, status, headers):
            super().on_head(status, headers)
            if moment == "on_head":
                exchange.abort()

        def on_body(self, data):
            super().on_body(data)
            if moment == "on_body":
                exchange.abort()

    left = asyncio.Event()

    async def script(count, reader, writer):
        await read_request(reader)
        writer.write(CHUNKED + b"2\r\nok\r\n")
        await reader.read()
        left.set()

    port = await engine(script)
    heard = Quitter()
    with await pool.request(Origin("127.0.0.1", port), "POST", "/", (), b"", heard) as exchange:
        await until(lambda: heard.calls)
        before = list(heard.calls)
        exchange.abort()
        exchange.abort()
    await asyncio.wait_for(left.wait(), 5)
    assert heard.calls == before == {"on_head": ["head"], "on_body": ["head", "body"]}.get(moment, ["head", "body", "body"])


async def test_pause_holds_the_engine_back(pool, engine, until):
    blocked = asyncio.Event()
    total = 0

    async def script(count, reader, writer):
        nonlocal total
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(200):
            writer.write(b"x" * 100_000)
            total += 100_000
            draining = asyncio.ensure_future(writer.drain())
            done, _ = await asyncio.wait([draining], timeout=0.2)
            if not done:
                blocked.set()
            await draining

    port = await engine(script)
    exchange, heard = await ask(pool, port, Deadlines(idle_s=0.1))
    await until(lambda: heard.calls)
    exchange.pause()
    exchange.pause()
    await asyncio.wait_for(blocked.wait(), 10)
    kept = len(heard.body)
    await asyncio.sleep(0.15)  # more than the idle deadline, which does not count while we are the ones who pause
    assert len(heard.body) == kept
    exchange.resume()
    assert await heard.done is None
    assert len(heard.body) == total == 20_000_000


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart"])
async def test_fetch_has_one_deadline_for_all(pool, engine, until, sent):
    port = await engine(answers(sent))
    with pytest.raises(UpstreamLost, match="in all") as caught:
        await pool.fetch(Origin("127.0.0.1", port), "POST", "/", timeout_s=0.05)
    assert caught.value.loss is (Loss.IDLE_TIMEOUT if sent else Loss.HEAD_TIMEOUT)
    await until(lambda: pool.connections == 0)


async def test_fetch_has_a_cap(pool, engine, until):
    port = await engine(answers(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n", b"x" * 800_000))
    with pytest.raises(UpstreamLost) as caught:
        await pool.fetch(Origin("127.0.0.1", port), "POST", "/", timeout_s=5, max_bytes=100_000)
    assert caught.value.loss is Loss.TOO_LARGE
    await until(lambda: pool.connections == 0)


async def test_an_early_answer_to_a_long_body_spoils_the_connection(pool, engine, until):
    async def script(count, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.get_running_loop().create_future()

    port = await engine(script)
    response = await pool.fetch(Origin("127.0.0.1", port), "POST", "/", body=b"x" * 30_000_000, timeout_s=5)
    assert response.status == 413
    assert pool.idle_connections == 0
    await until(lambda: pool.connections == 0)


@pytest.mark.parametrize("answer", [(OK,), (CHUNKED,), (CHUNKED[:-7], CHUNKED[-7:])])
async def test_a_failing_receiver_is_told_of_and_costs_its_connection(pool, engine, until, answer):
    stories = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: stories.append(context["exception"]))

    class Broken(Heard):
        def on_body(self, data):
            raise ZeroDivisionError

    async def script(count, reader, writer):
        await read_request(reader)
        for part in answer:
            writer.write(part)
            await asyncio.sleep(0.01)  # so that the chunk comes alone
        await reader.read()

    heard = Broken()
    port = await engine(script)
    await pool.request(Origin("127.0.0.1", port), "POST", "/", (), b"", heard)
    error = await heard.done
    assert error is not None
    assert error.loss is Loss.PROTOCOL
    await until(lambda: pool.connections == 0)
    assert isinstance(stories[0], ZeroDivisionError)


async def test_closing_the_pool_ends_everything(engine, until):
    pool = Pool()
    port = await engine(answers(CHUNKED))
    exchange, heard = await ask(pool, port)
    await until(lambda: heard.body)
    await pool.close()
    assert (await heard.done).loss is Loss.CLOSED_BY_US
    assert exchange.is_over
    assert pool.connections == 0
    with pytest.raises(UpstreamLost):
        await ask(pool, port)
    await until(lambda: pool.connections == 0)
    gc.collect()  # what was left open would warn here, and warnings are errors


async def test_ipv6_and_names():
    assert Origin("::1", 80).authority == b"[::1]:80"
    assert str(Origin("engine-0.local", 8000, tls=True)) == "https://engine-0.local:8000"


async def test_the_whole_relay(pool, start, connect, engine, until):
    """Engine to client through both halves, under a slow reader: everything arrives, in order, and little is kept."""
    pieces = [b"data: %d %b\n\n" % (number, b"x" * 10_000) for number in range(2000)]

    async def script(count, reader, writer):
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    port = await engine(script)
    deepest = 0

    async def relay(request: Request, responder: Responder) -> None:
        class Relay(Heard):
            def on_head(self, status, headers):
                responder.start(status, headers)

            def on_body(self, data):
                nonlocal deepest
                responder.write(data)
                deepest = max(deepest, responder.transport.get_write_buffer_size())

            def on_end(self):
                responder.finish()
                super().on_end()

        heard = Relay()
        with await pool.request(Origin("127.0.0.1", port), "POST", "/", (), request.body, heard) as exchange:
            responder.on_pause, responder.on_resume = exchange.pause, exchange.resume
            assert await heard.done is None

    wire = await connect(await start(relay))
    wire.send(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    got = bytearray()
    while piece := await wire.reader.read(30_000):
        got += piece
        if len(got) < 3_000_000:
            await asyncio.sleep(0.001)
    _, _, body = bytes(got).partition(b"\r\n\r\n")
    assert dechunk(body) == b"".join(pieces)
    assert deepest < 2_000_000


def dechunk(body: bytes) -> bytes:
    out, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(out)
        out.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


ANSWERS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A:  b \r\n\r\n"
    b"c\r\nA\r\n3\r\nab\r\n\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\n0014;e=1\r\ndata: a longer one\n\n\r\n1\r\n\r\r\n2\r\n\r\n\r\n0\r\nT: 1\r\n\r\n"
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edges=st.sets(st.integers(1, len(ANSWERS) - 1), max_size=12))
async def test_packet_edges_do_not_matter(engine, edges):
    cuts = [0, *sorted(edges), len(ANSWERS)]
    parts = [ANSWERS[a:b] for a, b in pairwise(cuts)]

    async def script(count, reader, writer):
        while True:
            await read_request(reader)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)

    port = await engine(script)
    pool = Pool()
    for _ in range(2):
        _, heard = await ask(pool, port)
        assert await heard.done is None
        assert heard.body == b"A\r\n3\r\nab\r\n\r\ndata: 1\n\ndata: a longer one\n\n\r\r\n"
        assert heard.headers == [(b"transfer-encoding", b"chunked"), (b"x-a", b"b")]
        assert (heard.calls[0], heard.calls[-1]) == ("head", "end")
    await pool.close()


class Sink:
    """The little of a transport that a connection writes to."""

    def write(self, data):
        assert data

    def writelines(self, parts):
        assert parts

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return False

    def abort(self):
        raise AssertionError("the connection was given up")


LOOKALIKES = [b"\r\n", b"\r", b"\n", b"0", b"3", b"a", b"5\r\nhello\r\n", b"data: x\n\n"]
HOSTILE = st.lists(st.sampled_from(LOOKALIKES), min_size=1, max_size=6).map(b"".join)
SIZE_LINES = st.sampled_from([b"%x\r\n", b"%X\r\n", b"0%x\r\n", b"%x;e=1\r\n"])


@settings(max_examples=400, deadline=None)
@given(payloads=st.lists(HOSTILE, min_size=1, max_size=6), data=st.data())
async def test_chunks_are_told_from_what_looks_like_chunks(payloads, data):
    """Bodies that look like framing, at any edges: the way past the parser must agree with the parser."""
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for payload in payloads:
        stream += data.draw(SIZE_LINES) % len(payload) + payload + b"\r\n"
    stream += b"0\r\n\r\n"
    lines = [match.end() for match in re.finditer(rb"\r\n", stream[:-1])]  # where a chunk may begin, or seem to
    anywhere = data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=3))
    edges = sorted(data.draw(st.sets(st.sampled_from(lines))) | anywhere)
    pool = Pool()
    connection = EngineConnection(pool, Origin("engine", 1), asyncio.get_running_loop())
    connection.connection_made(Sink())
    for _ in range(2):
        heard = Heard()
        connection.send(b"head", b"", heard, Deadlines(), is_head_request=False)
        for a, b in pairwise([0, *edges, len(stream)]):
            connection.data_received(stream[a:b])
        assert heard.body == b"".join(payloads)
        assert heard.calls.count("end") == 1
        assert pool.idle_connections == 1
        pool._take_idle(connection.origin)
    connection.connection_lost(None)
    await pool.close()


async def test_a_thousand_streams_at_once(pool, until):
    gate = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        await gate.wait()
        responder.write(request.body)
        responder.finish()

    server = await serve(handler, host="127.0.0.1", port=0, limits=Limits())
    asked = await asyncio.gather(*(ask(pool, server.port, body=b"%d" % number) for number in range(1000)))
    await until(lambda: server.connections == 1000)
    gate.set()
    for number, (_, heard) in enumerate(asked):
        assert await heard.done is None
        assert heard.body == b"%d" % number
    await until(lambda: pool.idle_connections == 1000)
    await pool.close()
    await server.close()
