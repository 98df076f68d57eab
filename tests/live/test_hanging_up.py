"""A client that hangs up frees what worked for it, within about a second: the slots, the KV, the gateway's own record."""

import time
from collections.abc import Callable

import pytest
from tests.live import prompts, wire
from tests.live.service import Service
from tests.live.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.timeout(60, func_only=True)]

FREED_S = 2.0  # "about a second" on a core that others may use, too
NEVER_ENDING = 4000
"""Tokens: a minute's answer."""


@pytest.fixture(autouse=True)
def _left_well(service: Service) -> None:
    service.wait_until_idle()


def outcome(service: Service) -> Callable[[], float]:
    """Counts the clients that left since now."""
    before = service.scrape().total("twinpool_requests_total", outcome="client_left")
    return lambda: service.scrape().total("twinpool_requests_total", outcome="client_left") - before


def check_well(service: Service, within_s: float = FREED_S) -> None:
    """Nothing is left of it, and the next request is answered, by both workers."""
    service.wait_until_idle(within_s)
    answer = wire.post(service.url, "completions", prompts.body("completions", 20, model=service.model, max_tokens=2))
    assert answer.status == 200
    assert answer.headers["x-twinpool-path"] == "disaggregated"


def one_step_s(service: Service) -> float:
    """How long this machine, as busy as it is, takes for as many prompt tokens as an engine computes at once."""
    tokens = wire.ask(service.prefill.url, "GET", "/twinpool/identity").json()["batch_tokens"]
    body = {"model": service.model, "prompt": prompts.tokens(tokens + 1), "max_tokens": 1}
    began = time.monotonic()
    assert wire.post(service.prefill.url, "completions", body).status == 200
    return time.monotonic() - began


@pytest.mark.parametrize("n", [1, 2], ids=["disaggregated", "colocated"])
def test_in_the_middle_of_a_stream(service: Service, n: int) -> None:
    left = outcome(service)
    body = prompts.body("chat/completions", 40, model=service.model, max_tokens=NEVER_ENDING, stream=True, n=n)
    body |= prompts.going_on_for_ever()
    with wire.sent(service.url, wire.request_bytes("chat/completions", body)) as connection:
        wire.read_until(connection, b'"content":')
        until(lambda: service.decode.requests_running() + service.prefill.requests_running() == n, within_s=5.0)
    check_well(service)
    assert left() == 1


def test_during_the_prefill_of_a_long_prompt(service: Service) -> None:
    """The engine lets go at the end of its step: most of the prompt is never computed."""
    step_s = one_step_s(service)
    left, before = outcome(service), service.prefill.prompt_tokens_computed()
    body = prompts.body("completions", 4000, model=service.model, max_tokens=4, stream=True)
    with wire.sent(service.url, wire.request_bytes("completions", body)):
        until(lambda: service.prefill.requests_running() == 1, within_s=5.0)
    check_well(service, FREED_S + 2 * step_s)  # the one under way, and where the news just missed its end the next
    assert left() == 1
    assert service.prefill.prompt_tokens_computed() - before < 2500


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_during_an_answer_that_is_not_streamed(service: Service, path: str) -> None:
    left = outcome(service)
    body = prompts.body(path, 40, model=service.model, max_tokens=NEVER_ENDING) | prompts.going_on_for_ever()
    with wire.sent(service.url, wire.request_bytes(path, body)):
        until(lambda: service.decode.requests_running() == 1, within_s=5.0)
    check_well(service)
    assert left() == 1


def test_while_it_waits_for_a_slot(service: Service) -> None:
    """More clients than slots, of which all hang up at once, those that wait included."""
    left, slots = outcome(service), service.ready["workers"][0]["slots"]
    body = prompts.body("completions", 20, model=service.model, max_tokens=NEVER_ENDING, stream=True)
    data = wire.request_bytes("completions", body | prompts.going_on_for_ever())
    connections = [wire.dial(service.url) for _ in range(slots + 2)]
    try:
        for connection in connections:
            connection.sendall(data)
        until(lambda: service.decode.requests_running() == slots, within_s=10.0)
        until(lambda: service.scrape().total("twinpool_requests_live") == slots + 2, within_s=5.0)
    finally:
        for connection in connections:
            connection.close()
    check_well(service)
    assert left() == slots + 2
