"""Clients that leave, and what becomes of the KV that was read for them: freed at once where somebody can see to it, or else
when its lease ends, and counted until then."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import pytest
from tests.live import prompts
from tests.live.scrape import Scrape
from tests.live.waiting import until
from tests.vllm.conftest import LEASE_S
from tests.vllm.engine import MODEL, Engine
from tests.vllm.service import Front

pytestmark = pytest.mark.vllm

SEEN_S = 10.0  # an engine looks after a connection that was closed at the end of its step
LEASE_ENDS_S = LEASE_S + 10.0


@pytest.fixture(autouse=True)
def idle(service: Front) -> Iterator[None]:
    """Before and after: nothing runs, nothing is held, anywhere."""
    service.wait_until_idle(within_s=LEASE_ENDS_S)
    yield
    service.wait_until_idle(within_s=LEASE_ENDS_S)
    assert service.chat(prompts.text(20), max_tokens=2).path == "disaggregated"


@contextmanager
def asking(service: Front, tokens: int) -> Iterator[socket.socket]:
    """A streamed chat whose client leaves at the end of the block."""
    host, _, port = service.url.removeprefix("http://").partition(":")
    asked = {"model": MODEL, "messages": [{"role": "user", "content": prompts.text(tokens)}]}
    body = json.dumps({**asked, "stream": True, "max_tokens": 600, "ignore_eos": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=120) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        yield connection


def pair(service: Front) -> tuple[Engine, Engine]:
    decode = service.name_of_decode()
    (prefill,) = (name for name in service.engines if name != decode)
    return service.engines[prefill], service.engines[decode]


def test_a_client_that_leaves_while_its_prompt_is_read(service: Front) -> None:
    """The prefill is broken off: no handle comes to be, nothing is held."""
    prefill, _ = pair(service)
    expired = prefill.expired()
    with asking(service, 1200):
        until(lambda: prefill.scrape().total("vllm:num_requests_running") > 0, within_s=30)
    until(prefill.is_idle, within_s=SEEN_S)
    assert prefill.expired() == expired


def test_a_client_that_leaves_between_the_legs(service: Front) -> None:
    """The decode leg is under way when the client goes, and never arrives. Nobody knows that it did not: so the handle is not
    presented again, P holds the KV until its lease ends, and the gateway counts it until then."""
    prefill, decode = pair(service)
    network = service.relays[decode.name]
    expired, moved, held = prefill.expired(), decode.moved_bytes(), network.held
    network.hold()
    try:
        with asking(service, 150):
            until(lambda: network.held > held, within_s=60)
            assert prefill.kv_usage() > 0
        until(lambda: Scrape(service.url).total("twinpool_requests_live") == 0, within_s=30)
        assert Scrape(service.url).total("twinpool_kv_handles") == 1
        assert prefill.kv_usage() > 0
        until(lambda: prefill.kv_usage() == 0, within_s=LEASE_ENDS_S)
    finally:
        network.let_go()
    assert prefill.expired() == expired + 1
    assert decode.moved_bytes() == moved
    until(lambda: Scrape(service.url).total("twinpool_kv_handles") == 0, within_s=30)


def test_a_client_that_leaves_while_it_is_answered(service: Front) -> None:
    """D has read the KV, so P is free long before the answer's end; D breaks off."""
    prefill, decode = pair(service)
    expired = prefill.expired()
    with asking(service, 150) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        until(lambda: prefill.kv_usage() == 0, within_s=SEEN_S)
        assert decode.kv_usage() > 0
    until(decode.is_idle, within_s=SEEN_S)
    assert prefill.expired() == expired


def test_many_that_leave_at_every_moment(service: Front) -> None:
    """From at once to in the middle of the answer: what is left behind is gone when the last lease has ended."""
    for part in range(8):
        with asking(service, 100) as connection:
            leaves_at = monotonic() + 0.25 * part
            while (left_s := leaves_at - monotonic()) > 0:
                connection.settimeout(left_s)
                with suppress(TimeoutError):
                    assert connection.recv(1 << 16), "the answer of 600 tokens ended before its client left"
    service.wait_until_idle(within_s=LEASE_ENDS_S)
