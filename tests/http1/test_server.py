"""What a client of ours may send, and what it gets."""

import asyncio
import json
import socket
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinpool.errors import OverloadedError
from twinpool.http1 import Request, Responder

POST = b"POST /v1/x?a=b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"


def refusal(body: bytes) -> tuple[str, str]:
    error = json.loads(body)["error"]
    return error["type"], error["code"]


async def test_a_request_is_read_and_answered(start, connect):
    seen = []

    async def handler(request: Request, responder: Responder) -> None:
        seen.append(request)
        responder.send(201, [(b"x-own", b"1"), (b"content-length", b"99"), (b"connection", b"upgrade")], b"done")

    wire = await connect(await start(handler))
    wire.send(POST.replace(b"Host: x", b"Host: x\r\nX-Two:  b \t\r\nX-Two: c"))
    status, headers, body = await wire.answer()
    assert (status, body) == (201, b"done")
    assert headers.keys() == {b"x-own", b"date", b"content-length"}
    request = seen[0]
    assert (request.method, request.target, request.path, request.body) == ("POST", "/v1/x?a=b", "/v1/x", b"hello")
    assert request.header(b"x-two") == b"b"
    assert request.headers.count((b"x-two", b"c")) == 1


async def test_a_stream_is_chunked_and_goes_out_as_it_is_written(start, connect):
    go_on = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b"data: 1\n\n")
        responder.write(b"")
        await go_on.wait()
        responder.write(b"data: 2\n\n")
        responder.finish()

    wire = await connect(await start(handler))
    wire.send(POST)
    head = await wire.until(b"\r\n\r\n")
    assert b"transfer-encoding: chunked\r\n" in head
    assert await wire.until(b"\n\n\r\n") == b"9\r\ndata: 1\n\n\r\n"
    go_on.set()
    assert await wire.read(19) == b"9\r\ndata: 2\n\n\r\n0\r\n\r\n"
    wire.send(POST)  # the connection is still good
    assert b"200 OK" in await wire.until(b"\r\n\r\n")


async def test_pipelined_requests_are_answered_in_order(start, connect):
    gates = [asyncio.Event() for _ in range(3)]
    begun = []

    async def handler(request: Request, responder: Responder) -> None:
        number = int(request.path[1:])
        begun.append(number)
        await gates[number].wait()
        responder.send(200, [], request.path.encode())

    wire = await connect(await start(handler))
    wire.send(GET % 0 + GET % 1 + GET % 2)
    for gate in reversed(gates):
        gate.set()
    assert [(await wire.answer())[2] for _ in range(3)] == [b"/0", b"/1", b"/2"]
    assert begun == [0, 1, 2]


async def test_read_ahead_is_bounded(start, connect, until):
    gate = asyncio.Event()
    handled = 0

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal handled
        await gate.wait()
        handled += 1
        responder.send(200, [], b"")

    wire = await connect(await start(handler, max_pipelined_bytes=1000))
    wire.send(GET % 0)
    await asyncio.sleep(0)
    many = 8_000
    wire.send(b"GET /1 HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (b"a" * 2000) * many)  # 16 MB, more than sockets hold
    drained = asyncio.ensure_future(wire.writer.drain())
    done, _ = await asyncio.wait([drained], timeout=0.3)
    assert not done  # the server has stopped reading
    gate.set()

    async def swallow() -> None:
        while await wire.reader.read(1 << 20):
            pass

    swallowing = asyncio.ensure_future(swallow())
    await asyncio.wait_for(drained, 30)
    wire.send(b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await asyncio.wait_for(swallowing, 30)
    assert handled == many + 2


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 700_000,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 700_000,
    ],
    ids=lambda sent: sent[:90].decode("latin-1"),
)
async def test_malformed_http_gets_400_and_the_end(start, connect, sent):
    handled = []

    async def handler(request: Request, responder: Responder) -> None:
        handled.append(request)
        responder.send(200, [], b"")

    wire = await connect(await start(handler))
    wire.send(sent)
    status, headers, body = await wire.answer()
    assert status == 400
    assert headers[b"connection"] == b"close"
    assert refusal(body) == ("invalid_request_error", "invalid_request")
    assert await wire.closed()
    assert not handled


async def test_requests_before_a_malformed_one_are_answered_first(start, connect, echo):
    wire = await connect(await start(echo))
    wire.send(POST + b"nonsense\r\n\r\n")
    assert (await wire.answer())[2] == b"hello"
    assert (await wire.answer())[0] == 400
    assert await wire.closed()


@pytest.mark.parametrize("how", ["length", "chunked", "expect"])
async def test_a_body_over_the_cap_gets_413_before_it_is_all_there(start, connect, echo, how):
    server = await start(echo, max_body_bytes=100_000)
    wire = await connect(server)
    match how:
        case "length":
            wire.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n")
        case "expect":
            wire.send(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 100001\r\n\r\n")
        case "chunked":
            wire.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            wire.send(b"c350\r\n" + b"a" * 50_000 + b"\r\n", b"c351\r\n" + b"a" * 50_001)
    status, headers, body = await wire.answer()
    assert status == 413
    assert headers[b"connection"] == b"close"
    assert refusal(body) == ("invalid_request_error", "body_too_large")
    wire.send(b"a" * 200_000)  # it may go on sending
    assert await wire.closed()


async def test_a_client_that_reads_only_after_sending_gets_its_413(start, connect, echo):
    wire = await connect(await start(echo, max_body_bytes=1 << 20))
    wire.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
    for _ in range(30):
        wire.send(b"a" * 100_000)
        await wire.writer.drain()
    assert (await wire.answer())[0] == 413


async def test_lingering_is_bounded(start, connect, echo, until):
    server = await start(echo, max_body_bytes=10, linger_s=0.05)
    wire = await connect(server)
    wire.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n")
    assert (await wire.answer())[0] == 413
    await until(lambda: server.connections == 0)  # though the client never ends its side


async def test_a_body_at_the_cap_passes(start, connect, echo):
    wire = await connect(await start(echo, max_body_bytes=5))
    wire.send(POST)
    assert (await wire.answer())[2] == b"hello"


async def test_expect_100_continue(start, connect, echo):
    wire = await connect(await start(echo))
    wire.send(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    assert await wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"hello")
    assert (await wire.answer())[2] == b"hello"


async def test_100_continue_waits_for_its_turn(start, connect):
    gate = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        await gate.wait()
        responder.send(200, [], request.body)

    wire = await connect(await start(handler))
    wire.send(POST + b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n")
    await asyncio.sleep(0)
    gate.set()
    assert (await wire.answer())[2] == b"hello"
    assert await wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.send(b"world")
    assert (await wire.answer())[2] == b"world"


@pytest.mark.parametrize(
    "sent",
    [
        b"POST / HTTP/1.1\r\nHost",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhal",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhal",
        POST + b"GET ",
    ],
)
async def test_half_a_request_then_silence_gets_408(start, connect, echo, sent):
    wire = await connect(await start(echo, header_timeout_s=0.04, body_timeout_s=0.04))
    wire.send(sent)
    if sent.startswith(POST):
        await wire.answer()
    status, headers, body = await wire.answer()
    assert status == 408
    assert headers[b"connection"] == b"close"
    assert refusal(body) == ("invalid_request_error", "request_timeout")
    assert await wire.closed()


async def test_a_head_that_drips_is_cut_off(start, connect, echo):
    wire = await connect(await start(echo, header_timeout_s=0.1))

    async def drip() -> None:
        wire.send(b"GET /")
        while True:
            wire.send(b"a")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    try:
        assert (await wire.answer())[0] == 408
    finally:
        dripping.cancel()
        await asyncio.wait([dripping])


async def test_idle_connections_are_closed_without_a_word(start, connect, echo):
    server = await start(echo, keep_alive_s=0.04)
    fresh, used = await connect(server), await connect(server)
    used.send(POST)
    await used.answer()
    assert await fresh.rest() == b""
    assert await used.rest() == b""


async def test_a_running_handler_has_no_deadline_of_the_servers(start, connect):
    async def handler(request: Request, responder: Responder) -> None:
        await asyncio.sleep(0.2)
        responder.send(200, [], b"late")

    wire = await connect(await start(handler, keep_alive_s=0.02, body_timeout_s=0.02, header_timeout_s=0.02))
    wire.send(POST)
    assert (await wire.answer())[2] == b"late"


@pytest.mark.parametrize("leaving", ["close", "shutdown", "reset"])
@pytest.mark.parametrize("started", [False, True])
async def test_the_handler_is_cancelled_when_its_client_leaves(start, connect, until, leaving, started):
    ends = []
    running = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        if started:
            responder.start(200, [])
            responder.write(b"x")
        running.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            responder.write(b"nobody hears this")
            responder.finish()
            ends.append(responder.is_over)
            raise

    server = await start(handler)
    wire = await connect(server)
    wire.send(POST)
    await running.wait()
    match leaving:
        case "close":
            wire.writer.close()
        case "shutdown":
            wire.writer.write_eof()
        case "reset":
            wire.writer.transport.abort()
    await until(lambda: ends == [True])
    await until(lambda: server.connections == 0)


async def test_what_a_handler_does_after_its_answer_is_not_cancelled(start, connect, until):
    answered = asyncio.Event()
    go_on = asyncio.Event()
    done = []

    async def handler(request: Request, responder: Responder) -> None:
        responder.send(200, [], b"")
        answered.set()
        await go_on.wait()
        done.append(True)

    server = await start(handler)
    wire = await connect(server)
    wire.send(POST)
    await wire.answer()
    wire.writer.close()
    await until(lambda: server.connections == 0)
    go_on.set()
    await until(lambda: done)


async def test_a_pipelining_client_that_leaves_is_noticed(start, connect, until):
    begun = []

    async def handler(request: Request, responder: Responder) -> None:
        begun.append(request.path)
        await asyncio.get_running_loop().create_future()

    server = await start(handler)
    wire = await connect(server)
    await wire.send_apart(GET % 1, GET % 2, GET % 3)
    await until(lambda: begun)
    wire.writer.close()
    await until(lambda: server.connections == 0)
    assert begun == ["/1"]


@pytest.mark.parametrize("http", [b"1.1", b"1.0"])
@pytest.mark.parametrize("length", [None, 10])
async def test_a_cut_answer_looks_cut(start, connect, http, length):
    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [], length=length)
        responder.write(b"part")
        responder.abort()

    wire = await connect(await start(handler))
    wire.send(b"GET / HTTP/%b\r\nHost: x\r\n\r\n" % http)
    if http == b"1.0" and length is None:  # only a reset can tell
        with pytest.raises(ConnectionError):
            await wire.rest()
        return
    answer = await wire.rest()
    assert b"part" in answer
    assert not answer.endswith(b"0\r\n\r\n")


async def test_a_body_shorter_than_its_length_is_cut(start, connect):
    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [], length=10)
        responder.write(b"part")
        responder.finish()

    wire = await connect(await start(handler))
    wire.send(POST)
    assert (await wire.rest()).endswith(b"part")


@pytest.mark.parametrize(
    ("head", "stays"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True),
    ],
)
async def test_keep_alive(start, connect, echo, head, stays):
    wire = await connect(await start(echo))
    wire.send(head)
    _, headers, _ = await wire.answer()
    expected = {(False, False): b"close", (True, True): b"keep-alive"}
    is_http10 = b"1.0" in head
    assert headers.get(b"connection") == (b"close" if not stays else expected.get((is_http10, stays)))
    if stays:
        wire.send(head)
        await wire.answer()
    else:
        assert await wire.closed()


async def test_http10_streams_until_the_connection_ends(start, connect):
    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(b"one")
        responder.write(b"two")
        responder.finish()

    wire = await connect(await start(handler))
    wire.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    head, _, body = (await wire.rest()).partition(b"\r\n\r\n")
    assert body == b"onetwo"
    assert b"chunked" not in head


@pytest.mark.parametrize("streamed", [False, True])
async def test_head_gets_no_body(start, connect, streamed):
    async def handler(request: Request, responder: Responder) -> None:
        if streamed:
            responder.start(200, [])
            responder.write(b"body")
            responder.finish()
        else:
            responder.send(200, [], b"body")

    wire = await connect(await start(handler))
    wire.send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\nHEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answers = await wire.rest()
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b"body" not in answers


async def test_what_comes_behind_connection_close_is_ignored(start, connect, echo):
    wire = await connect(await start(echo))
    wire.send(b"GET /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + GET % 2)
    assert (await wire.rest()).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("body", [b"", b"Content-Length: 5\r\n"])
async def test_an_upgrade_is_not_taken_up(start, connect, echo, body):
    wire = await connect(await start(echo))
    wire.send(b"POST /u HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n" + body + b"\r\n")
    wire.send(b"hello" if body else b"")
    status, headers, _ = await wire.answer()
    assert (status, headers[b"x-path"]) == (200, b"/u")
    assert await wire.closed()


@pytest.mark.parametrize(
    ("target", "path"), [(b"http://x/a/b?c", "/a/b"), (b"http://x", "/"), (b"*", "*"), (b"/%20?x", "/%20")]
)
async def test_paths(start, connect, echo, target, path):
    wire = await connect(await start(echo))
    wire.send(b"OPTIONS %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)
    assert (await wire.answer())[1][b"x-path"].decode() == path


@pytest.mark.parametrize("headers", [[(b"x", b"a\r\nset-cookie: 1")], [(b"x\n", b"a")], [(b"x", b"a\0")], [(b"x", b"\n")]])
async def test_a_header_cannot_break_out_of_its_line(start, connect, headers):
    async def handler(request: Request, responder: Responder) -> None:
        with pytest.raises(ValueError, match="line break"):
            responder.start(200, headers)
        responder.send(200, [], b"clean")

    wire = await connect(await start(handler))
    wire.send(POST)
    assert (await wire.answer())[2] == b"clean"


async def test_a_request_error_becomes_its_envelope(start, connect):
    async def handler(request: Request, responder: Responder) -> None:
        raise OverloadedError("full", retry_after_s=3)

    wire = await connect(await start(handler))
    wire.send(POST)
    status, headers, body = await wire.answer()
    assert (status, headers[b"retry-after"]) == (429, b"3")
    assert refusal(body) == ("overloaded_error", "queue_full")


@pytest.mark.parametrize("how", ["raises", "raises late", "forgets"])
async def test_a_broken_handler_is_an_answer_and_a_story(start, connect, how):
    stories = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: stories.append(context))

    async def handler(request: Request, responder: Responder) -> None:
        if how == "raises late":
            responder.start(200, [])
        if how != "forgets":
            raise ZeroDivisionError

    wire = await connect(await start(handler))
    wire.send(POST)
    if how == "raises late":
        assert not (await wire.rest()).endswith(b"0\r\n\r\n")
    else:
        status, _, body = await wire.answer()
        assert (status, refusal(body)[1]) == (500, "internal_error")
    assert "POST /v1/x" in stories[0]["message"]


async def test_a_slow_reader_pauses_the_writer(start, connect, until):
    pauses = []
    written = 0
    wait = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal written
        responder.on_pause = lambda: pauses.append("pause")
        responder.on_resume = lambda: pauses.append("resume")
        responder.start(200, [])
        while not responder.is_paused:
            responder.write(b"x" * 10_000)
            written += 10_000
            await asyncio.sleep(0)
        await wait.wait()
        responder.finish()

    server = await start(handler, write_buffer_bytes=100_000)
    wire = await connect(server)
    wire.writer.transport.pause_reading()
    wire.send(POST)
    await until(lambda: pauses == ["pause"])
    wire.writer.transport.resume_reading()
    reading = asyncio.create_task(wire.until(b"0\r\n\r\n"))
    wire.reader._limit = 1 << 30
    await until(lambda: pauses == ["pause", "resume"])
    wait.set()
    assert len(await reading) > written


async def test_a_client_that_takes_nothing_is_cut(start, connect, until):
    ended = []

    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        try:
            while True:
                if not responder.is_paused:
                    responder.write(b"x" * 100_000)
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    server = await start(handler, write_timeout_s=0.05)
    wire = await connect(server)
    wire.writer.transport.pause_reading()
    wire.send(POST)
    await until(lambda: ended)
    await until(lambda: server.connections == 0)


async def test_answers_to_a_client_that_reads_nothing_do_not_pile_up(start, connect, until):
    handled = 0

    async def handler(request: Request, responder: Responder) -> None:
        nonlocal handled
        handled += 1
        responder.send(200, [], b"x" * 1_000_000)

    server = await start(handler, write_timeout_s=0.2)
    wire = await connect(server)
    wire.writer.transport.pause_reading()
    wire.send(GET % 1 * 500)
    await until(lambda: server.connections == 0)
    assert handled < 50


async def test_nagle_is_off(start, connect):
    seen = []

    async def handler(request: Request, responder: Responder) -> None:
        sock = responder.transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        responder.send(200, [], b"")

    wire = await connect(await start(handler))
    wire.send(POST)
    await wire.answer()
    assert seen[0]


async def test_too_many_connections_are_refused_with_a_word(start, connect, echo):
    server = await start(echo, max_connections=1)
    first, second = await connect(server), await connect(server)
    second.send(POST)
    status, headers, body = await second.answer()
    assert (status, headers[b"retry-after"], refusal(body)[1]) == (503, b"1", "queue_full")
    first.send(POST)
    assert (await first.answer())[0] == 200


async def test_close_drains(start, connect):
    gates = [asyncio.Event(), asyncio.Event()]
    running = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        if request.path == "/1":
            responder.start(200, [])
        running.set()
        await gates[int(request.path[1:])].wait()
        if request.path == "/1":
            responder.finish()
        else:
            responder.send(200, [], b"late")

    server = await start(handler)
    idle, plain, streaming, half = [await connect(server) for _ in range(4)]
    half.send(b"GET /0 HTTP/1.1\r\n")
    streaming.send(GET % 1)
    await streaming.until(b"\r\n\r\n")
    running.clear()
    plain.send(GET % 0)
    await running.wait()
    closing = asyncio.create_task(server.close(drain_s=5))
    assert await idle.closed()
    with pytest.raises(OSError, match=r"refused|Connect"):
        await connect(server)
    half.send(b"Host: x\r\n\r\n")
    for gate in gates:
        gate.set()
    assert (await plain.answer())[1][b"connection"] == b"close"
    assert (await half.answer())[1][b"connection"] == b"close"
    assert await streaming.rest() == b"0\r\n\r\n"
    assert await plain.closed()
    await closing
    assert server.connections == 0


async def test_close_cuts_what_does_not_end(start, connect):
    cancelled = []

    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.append(True)

    server = await start(handler)
    wire = await connect(server)
    wire.send(POST)
    await wire.until(b"\r\n\r\n")
    await server.close(drain_s=0.02)
    assert cancelled == [True]
    assert server.connections == 0
    assert await wire.closed()


REQUESTS = (
    POST
    + b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;e=1\r\nabc\r\n2\r\nde\r\n0\r\nT: 1\r\n\r\n"
    + b"\r\nGET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edges=st.sets(st.integers(1, len(REQUESTS) - 1), max_size=12))
async def test_packet_edges_do_not_matter(start, connect, edges):
    seen = []

    async def handler(request: Request, responder: Responder) -> None:
        seen.append((request.method, request.path, request.body, len(request.headers)))
        responder.send(200, [], request.body)

    server = await start(handler)
    wire = await connect(server)
    cuts = [0, *sorted(edges), len(REQUESTS)]
    await wire.send_apart(*(REQUESTS[a:b] for a, b in pairwise(cuts)))
    assert [(await wire.answer())[2] for _ in range(3)] == [b"hello", b"abcde", b""]
    assert await wire.closed()
    assert seen == [("POST", "/v1/x", b"hello", 2), ("POST", "/c", b"abcde", 2), ("GET", "/last", b"", 2)]
    await server.close()
