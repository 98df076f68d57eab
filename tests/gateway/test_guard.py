"""Stock engines whose lease on the KV may have run out: garbage under HTTP 200 that must not reach a client.

The lease is declared as 0.6 s, so a token that comes later is held back. How long the prefill engine truly keeps the KV, what
it counts and whether it still lives is each test's own matter.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.gateway.house import CHAT, House, chat, house, told, until

from twinpool.config import Declared, Routing
from twinpool.engines.metrics import EngineMetrics
from twinpool.engines.probe import ProbeError
from twinpool.engines.scripted import GARBAGE, Default, End, Reply, Script
from twinpool.gateway.guard import Guard, Histories, Trust

STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
LEASE_S = 0.6
LATE_S = 0.8
DECLARED = Declared(lease_s=LEASE_S)
RULES = Routing(lease_margin_s=0.02)
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":"one"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"content":" two"},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]


def stock(**more: Any) -> Any:
    pools = {"prefill": 1, "decode": 1} | more
    return house(is_stock=True, declared=DECLARED, routing=RULES, **pools)


def late() -> Default:
    """The decode engine looks at its next request only when the lease is over."""
    return Default(delay_s=LATE_S)


async def failures(h: House, failure: str) -> float:
    return await h.metric("twinpool_leg_failures_total", leg="decode", failure=failure)


def asked(h: House) -> int:
    """How often a prompt of a client was prefilled."""
    return len(h.p.requests("/chat/completions"))


def decoding(h: House) -> bool:
    return any(recorded.takes_over and recorded.is_running for recorded in h.d.requests("/chat/completions"))


async def journal_has(h: House, *words: bytes) -> None:
    await until(lambda: any(all(word in line for word in words) for line in h.journal.read_bytes().splitlines()))


@STREAM
async def test_a_late_token_whose_lease_did_not_run_out_passes(stream: bool) -> None:
    async with stock() as h:
        await h.proved()
        h.d.script.replies.append(late())
        answer = await h.chat("n1", stream=stream)
        assert answer.status == 200
        assert GARBAGE.encode() not in answer.body
        assert answer.headers["x-twinpool-path"] == "disaggregated"
        assert asked(h) == 1
        assert await failures(h, "suspect") == 0
        assert h.p.ledger.misuses == 0


async def test_a_stream_that_was_held_back_is_passed_on_byte_for_byte() -> None:
    async with stock() as h:
        await h.proved()
        reply = Reply.stream(*EVENTS)
        h.d.script.replies.append(Reply(headers=reply.headers, chunks=reply.chunks, head_delay_s=LATE_S, pulls_kv=True))
        answer = await h.ask(CHAT, chat(stream=True))
        assert answer.body == b"".join(EVENTS)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


@STREAM
async def test_garbage_of_a_lease_that_ran_out_is_thrown_away_and_the_prompt_read_again(stream: bool) -> None:
    async with stock(prefill=Script(lease_s=LEASE_S)) as h:
        await h.proved()
        h.d.script.replies.append(late())
        answer = await h.chat("n1", stream=stream)
        assert answer.status == 200
        assert GARBAGE.encode() not in answer.body
        assert b"n1.15" in answer.body if stream else answer.text == told("n1")
        assert h.p.ledger.misuses == 1, "the decode engine did write garbage"
        assert asked(h) == 2
        assert await failures(h, "suspect") == 1
        await journal_has(h, b'"LegFailed"', b'"suspect"', b'"attempt":2')
        assert h.pair().state == "proved", "one late answer is one strike"


async def test_a_second_suspect_answer_is_the_last_and_one_worker_serves_the_request() -> None:
    async with stock(prefill=Script(lease_s=LEASE_S)) as h:
        await h.proved()
        h.d.script.replies.extend([late(), late()])
        answer = await h.chat("n1")
        assert answer.text == told("n1")
        assert answer.headers["x-twinpool-path"] == "colocated"
        assert await failures(h, "suspect") == 2
        assert await h.metric("twinpool_decisions_total", choice="colocated", reason="handoff_failed") == 1


@STREAM
@pytest.mark.parametrize("hides", [EXPIRED, "vllm:nixl_num_notifications_after_expiry_total"])
async def test_a_late_token_that_nobody_can_vouch_for_is_suspect(hides: str, stream: bool) -> None:
    async with stock(prefill=Script(metrics={hides: None})) as h:
        await h.proved()
        h.d.script.replies.append(late())
        answer = await h.chat("n1", stream=stream)
        assert GARBAGE.encode() not in answer.body
        assert await failures(h, "suspect") == 1
        assert asked(h) == 2


async def test_a_token_in_time_needs_nobody_to_vouch_for_it() -> None:
    async with house(prefill=Script(metrics={EXPIRED: None}), decode=1, is_stock=True) as h:
        await h.proved()
        assert (await h.chat("n1")).headers["x-twinpool-path"] == "disaggregated"
        assert await failures(h, "suspect") == 0


async def test_a_lease_that_ran_out_since_prefill_was_asked_casts_doubt_whosesoever_it_was() -> None:
    """Nobody tells when within an attempt its own lease began: P's answer may be on its way for longer than it lasts. What
    others' leases cost by that is a prompt that is read once more."""
    async with stock() as h:
        await h.proved()
        h.d.script.replies.append(late())
        asking = asyncio.create_task(h.chat("n1"))
        await until(lambda: decoding(h))
        h.p.script.metrics = {EXPIRED: 7.0}
        assert (await asking).text == told("n1")
        assert await failures(h, "suspect") == 1
        assert asked(h) == 2


@STREAM
@pytest.mark.parametrize("tells_life", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.05, 0.3, LATE_S])
async def test_a_prefill_engine_that_restarted_lets_no_garbage_through(stream: bool, tells_life: bool, delay_s: float) -> None:
    """At the same address, between its answer and the read; whether the token or the probe comes first."""
    metrics: dict[str, float | None] = {} if tells_life else {"process_start_time_seconds": None}
    async with stock(prefill=Script(metrics=metrics)) as h:
        await h.proved()
        h.d.script.replies.append(Default(delay_s=0.02 + delay_s))
        asking = asyncio.create_task(h.chat("n1", stream=stream))
        await until(lambda: decoding(h))
        await h.p.restart()
        answer = await asking
        assert answer.status == 200
        assert GARBAGE.encode() not in answer.body
        assert b"n1.15" in answer.body if stream else answer.text == told("n1")


async def test_a_connection_that_the_engine_closed_is_looked_into_at_once() -> None:
    """The next probe by itself would come in half a minute."""
    async with house(prefill=1, decode=1, is_stock=True, server={"probe_interval_s": 30.0}) as h:
        await h.proved()
        before = h.controller.cluster["p0"].facts.incarnation
        await h.chat("n1")
        await h.p.restart()
        await until(lambda: h.controller.cluster["p0"].facts.incarnation != before)
        await h.proved()
        assert (await h.chat("n2")).headers["x-twinpool-path"] == "disaggregated"


# While the token is held back


async def holds_back(h: House, answer: Reply | Default | None = None) -> asyncio.Event:
    """From now on the prefill engine does not say what it has counted; the next answer is late."""
    gate = asyncio.Event()
    h.d.script.replies.append(answer or late())
    await until(lambda: h.p.pages["/metrics"] > 0)
    h.p.script.pages_wait = gate
    return gate


def held_back(h: House) -> Callable[[], bool]:
    return lambda: bool(h.gateway._driver._guard._tasks)


@STREAM
async def test_a_client_that_leaves_meanwhile_is_gone(stream: bool) -> None:
    async with stock() as h:
        await h.proved()
        gate = await holds_back(h)
        async with await h.connect() as wire:
            wire.post(chat("n1", stream=stream))
            await until(held_back(h))
        await until(lambda: not h.controller.live_requests)
        gate.set()
        await h.settle()
        assert await h.outcomes() == {"client_left": 1}


@STREAM
@pytest.mark.parametrize("dies", ["d", "p"])
async def test_an_engine_that_dies_meanwhile_costs_an_attempt(stream: bool, dies: str) -> None:
    """The decode engine in mid answer; or the prefill engine, which can then vouch for nothing."""
    async with stock(colocated=1) as h:
        await h.proved()
        first = Default(delay_s=LATE_S, stops_after_events=2, end=End.HANG) if stream else late()
        gate = await holds_back(h, first)
        asking = asyncio.create_task(h.chat("n1", stream=stream))
        await until(held_back(h))
        await (h.d if dies == "d" else h.p).stop()
        gate.set()
        answer = await asking
        assert answer.status == 200
        assert b"n1.15" in answer.body if stream else answer.text == told("n1")


async def test_what_is_held_back_is_bounded_and_the_engine_feels_it() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 65_000)
    written = 0

    def endless() -> Any:
        nonlocal written
        yield LATE_S, EVENTS[0]
        while written < 400:
            written += 1
            yield 0.0, event
        yield 0.0, EVENTS[2]
        yield 0.0, EVENTS[3]

    async with stock() as h:
        await h.proved()
        gate = await holds_back(h, Reply(headers=Reply.stream().headers, chunks=endless(), pulls_kv=True))
        asking = asyncio.create_task(h.ask(CHAT, chat(stream=True)))
        await until(held_back(h))
        before = -1
        while written != before:
            before = written
            for _ in range(50):
                await asyncio.sleep(0.001)
        assert written < 250, "beyond a megabyte only the sockets hold some"
        gate.set()
        answer = await asking
        assert len(answer.body) == len(EVENTS[0]) + 400 * len(event) + len(EVENTS[2]) + len(EVENTS[3])


@pytest.mark.parametrize("runs_out", [False, True])
async def test_a_stream_without_any_token_is_doubted_like_another(runs_out: bool) -> None:
    finish = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    async with stock(prefill=Script(lease_s=LEASE_S if runs_out else 30.0)) as h:
        await h.proved()
        chunks = ((LATE_S, EVENTS[0]), (0.0, finish), (0.0, EVENTS[3]))
        h.d.script.replies.append(Reply(headers=Reply.stream().headers, chunks=chunks, pulls_kv=not runs_out))
        answer = await h.ask(CHAT, chat("n1", stream=True))
        assert await failures(h, "suspect") == runs_out
        if runs_out:
            assert b"n1.15" in answer.body
        else:
            assert answer.body == EVENTS[0] + finish + EVENTS[3]


async def test_an_error_that_comes_late_is_an_error_and_no_suspicion() -> None:
    async with stock(prefill=Script(lease_s=2 * LATE_S)) as h:  # this engine does not free what it refuses
        await h.proved()
        h.d.script.replies.append(Reply(status=400, body=b'{"error":{"message":"no","code":400}}', head_delay_s=LATE_S))
        assert (await h.chat("n1")).status == 400
        assert await failures(h, "suspect") == 0


async def test_the_gateway_ends_while_a_token_is_held_back() -> None:
    async with house(prefill=1, decode=1, is_stock=True, declared=DECLARED, routing=RULES, server={"drain_s": 0.05}) as h:
        await h.proved()
        gate = await holds_back(h)
        asking = asyncio.create_task(h.chat("n1"))
        await until(held_back(h))
        await h.gateway.close()
        h.is_closed = True
        gate.set()
        assert (await asking).status == 503


# The parts by themselves


def counted(expired: int | None = 0, late_reads: int | None = 0, incarnation: str = "1") -> EngineMetrics:
    return EngineMetrics(incarnation=incarnation, expired_handles=expired, late_notifications=late_reads)


async def believed(
    noted: list[tuple[float, EngineMetrics]],
    now: EngineMetrics | None,
    *,
    granted: float = 10.0,
    trusted_until: float = 20.0,
    first_token: float = 25.0,
    away: float | None = None,
) -> tuple[bool, bool]:
    """Whether it is safe as it is, and whether it is believed after a look."""
    histories = Histories()
    for at, metrics in noted:
        histories.note("p", at, metrics)
    if away is not None:
        histories.was_away("p", away)

    async def scrape(worker: str) -> EngineMetrics:
        if now is None:
            raise ProbeError("no answer")
        return now

    guard = Guard(histories, scrape)
    trust: Trust = guard.watch("p", granted, trusted_until)
    answers: list[bool] = []
    trust.find_out(first_token, answers.append)
    await until(lambda: answers)
    await guard.close()
    return trust.is_safe(first_token), answers[0]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (lambda: believed([(1, counted())], counted()), (False, True)),
        (lambda: believed([(1, counted())], counted(expired=1)), (False, False)),
        (lambda: believed([(1, counted())], counted(late_reads=1)), (False, False)),
        (lambda: believed([(1, counted())], counted(incarnation="2")), (False, False)),
        (lambda: believed([(1, counted())], None), (False, False)),
        (lambda: believed([], counted()), (False, False)),
        (lambda: believed([(1, counted(expired=None))], counted(expired=None)), (False, False)),
        (lambda: believed([(1, counted()), (15, counted(expired=3))], counted(expired=3)), (False, False)),
        (lambda: believed([(1, counted()), (21, counted(expired=3))], counted(expired=3)), (False, False)),
        (lambda: believed([(1, counted())], counted(), first_token=19.0), (True, True)),
        (lambda: believed([(1, counted())], counted(), first_token=20.0), (False, True)),
        (lambda: believed([(1, counted())], counted(), first_token=19.0, away=9.0), (True, True)),
        (lambda: believed([(1, counted())], counted(), first_token=19.0, away=12.0), (False, True)),
        (lambda: believed([(1, counted())], counted(incarnation="2"), first_token=19.0, away=12.0), (False, False)),
        (
            lambda: believed([(1, counted()), (13, counted(incarnation="2"))], counted(incarnation="2"), away=12.0),
            (False, False),
        ),
        (
            lambda: believed([(1, counted(incarnation=""))], counted(incarnation=""), first_token=19.0, away=12.0),
            (False, False),
        ),
        (lambda: believed([(1, counted(incarnation=""))], counted(incarnation=""), away=12.0), (False, False)),
        (lambda: believed([(1, counted(incarnation=""))], counted(incarnation="")), (False, True)),
    ],
    ids=[
        "late, nothing ran out",
        "late, a lease ran out",
        "late, a read came late",
        "another engine",
        "no answer now",
        "never scraped",
        "does not count",
        "a lease, before it could have ended",
        "counted after",
        "in time",
        "exactly late",
        "away before",
        "away since, the same",
        "away since, another",
        "away since, another, and late",
        "away since, nobody tells",
        "away since, nobody tells, and late",
        "nobody tells, never away",
    ],
)
async def test_what_is_believed(case: Callable[[], Awaitable[tuple[bool, bool]]], expected: tuple[bool, bool]) -> None:
    assert await case() == expected
