"""A whole service in one process: the real gateway on real sockets, scripted engines behind it, real clients before it.

    async with house(prefill=2, decode=Script(slots=4)) as h:
        answer = await h.chat("n17")
        assert answer.text == told("n17")

The engines are `h.p`, `h.d`, `h.c` (lists; the ids are p0, p1, d0, …). When the block ends, nothing may be left of what was
done in it: no request, no load, no handle, no request at an engine, no task, no socket, no failure that the loop's handler was
told of. The journal must replay, each of its files, and each request that the controller saw must have ended once.
"""

import asyncio
import io
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Self

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from twinpool.assemble import replay
from twinpool.config import Balance, BalanceMode, Config, Declared, Kept, Objectives, Routing, Server, Timeouts
from twinpool.core.lifecycle import HandleState
from twinpool.core.model import Role
from twinpool.engines.scripted import Recorded, Script, ScriptedEngine, answer_text
from twinpool.gateway.app import Gateway

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

SETTLES_WITHIN_S = 15.0  # a condition that is waited for: on a busy machine only the patience counts

Engines = int | Script | Iterable[Script]


async def until(condition: Callable[[], Any], within_s: float = SETTLES_WITHIN_S) -> None:
    """Wait until plain state is so."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110  what it waits for is plain state
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {condition.__qualname__}") from None


async def turns(count: int) -> None:
    """Let the loop go round so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def chat(nonce: str = "n1", **fields: Any) -> dict[str, Any]:
    """A body whose answer can be nobody else's."""
    return {"model": "scripted", "messages": [{"role": "user", "content": f"please answer {nonce}"}], **fields}


def told(nonce: str = "n1", tokens: int = 16) -> str:
    """What an engine must say to that."""
    return answer_text(f"user: please answer {nonce}", tokens)


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        choice = self.json()["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        return dict(error)

    @property
    def events(self) -> list[Any]:
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """The payloads of a stream in order; `[DONE]` as it is."""
    blocks = [block for block in body.decode().split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks), body
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def text_of(events: list[Any]) -> str:
    return "".join(
        choice.get("delta", {}).get("content") or choice.get("text") or ""
        for event in events
        if event != "[DONE]"
        for choice in event.get("choices", ())
    )


def finish_reasons(events: list[Any]) -> list[str]:
    choices = [choice for event in events if event != "[DONE]" for choice in event.get("choices", ())]
    return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]


class Stream:
    """An answer that is being read, event by event."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.status = response.status
        self.headers = response.headers

    async def event(self, within_s: float = 5.0) -> Any:
        """The next event's payload; None at the end."""
        async with asyncio.timeout(within_s):
            block = await self.response.content.readuntil(b"\n\n")
        return parse_events(block)[0] if block else None

    async def rest(self) -> list[Any]:
        async with asyncio.timeout(5):
            return parse_events(await self.response.content.read())

    def leave(self) -> None:
        """As a client does whose process ends: the socket closes."""
        self.response.close()


@dataclass
class House:
    gateway: Gateway
    prefill: list[ScriptedEngine]
    decode: list[ScriptedEngine]
    colocated: list[ScriptedEngine]
    journal: Path
    session: aiohttp.ClientSession
    failures: list[dict[str, Any]] = field(default_factory=list)
    """What the loop's exception handler was told. Empty it in a test that means it."""
    news: list[str] = field(default_factory=list)
    """What the person at the terminal is told."""
    is_closed: bool = False
    """The test has closed the gateway itself."""

    # Who is there

    @property
    def p(self) -> ScriptedEngine:
        return self.prefill[0]

    @property
    def d(self) -> ScriptedEngine:
        return self.decode[0]

    @property
    def c(self) -> ScriptedEngine:
        return self.colocated[0]

    @property
    def engines(self) -> dict[str, ScriptedEngine]:
        pools = {"p": self.prefill, "d": self.decode, "c": self.colocated}
        return {f"{pool}{index}": engine for pool, engines in pools.items() for index, engine in enumerate(engines)}

    @property
    def controller(self) -> Any:
        return self.gateway._driver.controller

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.admin_port}"

    def load(self, worker: str) -> tuple[int, int, int]:
        """Prompt tokens to read, tokens of KV, sequences."""
        seen = self.controller.cluster[worker]
        return seen.prefill_tokens, seen.kv_tokens, seen.sequences

    def handles(self) -> dict[HandleState, int]:
        return {state: count for state, count in self.controller.handles_by_state().items() if count}

    # Pairs

    def pair(self, prefill: str = "p0", decode: str = "d0") -> Any:
        return next(pair for pair in self.controller.pairs() if (pair.prefill, pair.decode) == (prefill, decode))

    async def proved(self) -> None:
        """Wait until each of the pairs is."""
        await until(lambda: all(pair.state == "proved" for pair in self.controller.pairs()), 20)

    async def aside(self, prefill: str = "p0", decode: str = "d0") -> str:
        """Wait until the pair is set aside; says why."""
        await until(lambda: self.pair(prefill, decode).state == "aside", 20)
        return str(self.pair(prefill, decode).trouble)

    # What a client does

    async def ask(self, path: str, body: Any = None, *, method: str = "POST", headers: dict[str, str] | None = None) -> Answer:
        """One request and its whole answer. `body`: bytes as they are, anything else as JSON."""
        data = None if body is None else io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        url = path if "://" in path else self.url + path
        async with self.session.request(method, url, data=data, headers=headers) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return await self.ask(path, method="GET", headers=headers)

    async def chat(self, nonce: str = "n1", **fields: Any) -> Answer:
        return await self.ask(CHAT, chat(nonce, **fields))

    @asynccontextmanager
    async def stream(self, nonce: str = "n1", **fields: Any) -> AsyncIterator[Stream]:
        """A streamed chat, from its head on; the client leaves at the end of the block."""
        body = json.dumps(chat(nonce, stream=True, **fields)).encode()
        response = await self.session.post(self.url + CHAT, data=body)
        try:
            yield Stream(response)
        finally:
            response.close()

    async def connect(self) -> "Wire":
        """A connection on which anything can be written."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        return Wire(reader, writer)

    # What can be counted

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with that name and, among others, those labels."""
        scraped = (await self.get("/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(scraped)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def outcomes(self) -> dict[str, int]:
        """How many requests ended how, of those that could be routed."""
        scraped = (await self.get("/metrics")).body.decode()
        counts: dict[str, int] = {}
        for family in text_string_to_metric_families(scraped):
            for sample in family.samples:
                if sample.name == "twinpool_requests_total" and sample.labels["outcome"] != "turned_away":
                    outcome = sample.labels["outcome"]
                    counts[outcome] = counts.get(outcome, 0) + int(sample.value)
        return counts

    async def up(self, *workers: str) -> None:
        """Wait until these, or all, are known to be well."""
        for worker in workers or self.engines:
            await until(lambda worker=worker: self.gateway._members.get(worker).trouble is None)

    # The invariant

    def remains(self) -> list[str]:
        """What is left of requests; nothing, when it is quiet."""
        found = []
        if self.controller.live_requests or self.controller.waiting_requests():
            found.append(f"{self.controller.live_requests} live, {self.controller.waiting_requests()} waiting requests")
        if self.handles():
            found.append(f"handles {self.handles()}")
        loads = {worker.facts.worker: self.load(worker.facts.worker) for worker in self.controller.cluster}
        found += [f"load {load} on {worker}" for worker, load in loads.items() if any(load)]
        for name, engine in self.engines.items():
            if not engine.is_idle:
                found.append(f"{name}: {engine.running} running, {engine.ledger.held} handles held")
            if any(recorded.is_running for recorded in engine.recorded):
                found.append(f"{name}: a request without an end")
        return found

    async def settle(self, within_s: float = SETTLES_WITHIN_S) -> None:
        """Wait until nothing of any request is left."""
        with suppress(AssertionError):
            await until(lambda: not self.remains(), within_s)
        found = self.remains()
        assert not found, found
        self.controller.validate()

    def presented(self) -> list[str]:
        """Every handle that was shown to a decode engine, as often as it was."""
        return [
            recorded.kv_transfer_params["remote_request_id"]
            for engine in (*self.decode, *self.colocated)
            for recorded in engine.recorded
            if recorded.kv_transfer_params is not None and recorded.takes_over
        ]

    def journals(self) -> list[Path]:
        """The journal's files, the oldest first."""
        return files_of(self.journal)

    @property
    def access_log(self) -> Path:
        return self.journal.with_name("access.log")

    def arrivals(self) -> int:
        return sum(file.read_bytes().count(b'{"event":{"type":"RequestArrived"') for file in self.journals())


class Wire:
    """A client that sends what it likes, when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def post(self, body: Any, path: str = CHAT) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.writer.write(b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data))

    async def leave(self) -> float:
        """Close the socket; says when."""
        self.writer.transport.abort()
        left = monotonic()
        with suppress(ConnectionError):
            await self.writer.wait_closed()
        return left

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()


@asynccontextmanager
async def house(
    *,
    prefill: Engines = 0,
    decode: Engines = 0,
    colocated: Engines = 0,
    routing: Routing = Routing(),  # noqa: B008  frozen
    balance: Balance = Balance(mode=BalanceMode.OFF),  # noqa: B008
    objectives: Objectives = Objectives(),  # noqa: B008
    timeouts: Timeouts = Timeouts(),  # noqa: B008
    server: dict[str, Any] | None = None,
    allowed_roles: tuple[Role, ...] = (),
    api_keys: frozenset[str] = frozenset(),
    admin_token: str | None = None,
    kept: Kept | None = None,
    is_stock: bool = False,
    declared: Declared = Declared(),  # noqa: B008
    engine_key: str | None = None,
    learnt: Path | None = None,
) -> AsyncIterator[House]:
    """See the module. A number of engines, one script, or several. `kept` bounds the journal, and an access log beside it. The
    engines are embedded workers, unless `is_stock`: then they are what their scripts say, as `declared`, with `engine_key`."""
    loop = asyncio.get_running_loop()
    failures: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failures.append(context))
    tasks_before = asyncio.all_tasks()
    sockets_before = _sockets()
    settings = {"port": 0, "admin_port": 0, "probe_interval_s": 0.05, "drain_s": 1.0, "expose_route": True} | (server or {})
    bounds = kept or Kept()
    config = Config(
        server=Server(**settings),
        objectives=objectives,
        routing=routing,
        balance=balance,
        timeouts=timeouts,
        journal=bounds,
        access_log=bounds,
    )
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=30))
            )
            pools = {
                role: [await stack.enter_async_context(ScriptedEngine(script)) for script in _scripts(wanted, is_stock)]
                for role, wanted in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.COLOCATED, colocated))
            }
            journal = Path(folder, "journal")
            access_log = journal.with_name("access.log") if kept else None
            news: list[str] = []
            gateway = Gateway(
                config,
                api_keys=api_keys,
                admin_token=admin_token,
                engine_key=engine_key,
                journal=journal,
                access_log=access_log,
                learnt=learnt,
                say=news.append,
            )
            h = House(gateway, *pools.values(), journal, session, failures, news)
            try:
                await gateway.start()
                for role, engines in pools.items():
                    for index, engine in enumerate(engines):
                        allowed = allowed_roles or (role,)
                        gateway.attach(f"{role[0]}{index}", engine.url, role, allowed, declared, engine_key)
                await asyncio.wait_for(gateway.ready(), 5)
                yield h
                await h.settle()
                ended = None if h.is_closed else sum((await h.outcomes()).values())
            finally:
                if not h.is_closed:
                    await gateway.close()
            assert gateway._pool.connections == 0
            if len(h.journals()) <= bounds.keep:  # else the oldest may be gone
                assert ended in (h.arrivals(), None), "each request ends once"
            for file in h.journals():
                result = replay(_lines(file))
                assert result.difference is None, file.name
                assert not result.is_cut
    await turns(5)  # transports close in a turn of their own
    assert failures == []
    with suppress(AssertionError):
        await until(lambda: asyncio.all_tasks() <= tasks_before, 1)
    left = asyncio.all_tasks() - tasks_before
    assert not left, left
    with suppress(AssertionError):
        await until(lambda: _sockets() == sockets_before, 1)
    assert _sockets() == sockets_before


def _scripts(wanted: Engines, is_stock: bool) -> list[Script]:
    if isinstance(wanted, int):
        scripts = [Script() for _ in range(wanted)]
    else:
        scripts = [wanted] if isinstance(wanted, Script) else list(wanted)
    for script in scripts:
        script.is_embedded = not is_stock
    return scripts


def files_of(path: Path) -> list[Path]:
    """A record and its older files, the oldest first."""
    older = {int(file.suffix[1:]): file for file in path.parent.glob(f"{path.name}.*") if file.is_file()}
    return [*(older[number] for number in sorted(older, reverse=True)), path]


def _lines(journal: Path) -> list[bytes]:
    return journal.read_bytes().splitlines(keepends=True)


def _sockets() -> int:
    """How many sockets this process has open, where that can be seen."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return 0
    count = 0
    for name in os.listdir(folder):
        with suppress(OSError):
            count += os.readlink(folder / name).startswith("socket:")
    return count


def raw_fields(recorded: Recorded) -> dict[str, bytes]:
    """The top-level fields of a body as an engine got them, byte for byte."""
    fields = msgspec.json.decode(recorded.raw, type=dict[str, msgspec.Raw])
    return {name: bytes(value) for name, value in fields.items()}
