"""Roles change while requests are under way: between two requests, without a restart, and no request fails for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.live import prompts
from tests.live.waiting import until
from tests.vllm.service import Answer, Front

pytestmark = pytest.mark.vllm

CLIENTS = 3
TOKENS = 12


def test_roles_swap_under_load_and_back(service: Front) -> None:
    first_decode = service.name_of_decode()
    (first_prefill,) = (name for name in service.engines if name != first_decode)
    incarnations = {name: service.worker(name)["incarnation"] for name in service.engines}
    enough = threading.Event()
    answers: list[Answer] = []

    def keep_asking() -> None:
        while not enough.is_set():
            answers.append(service.chat(prompts.text(60), max_tokens=TOKENS, ignore_eos=True))

    def disaggregated(*, decode: str) -> int:
        """How many answers went from the other engine to this one so far."""
        worker = service.worker(decode)["id"]
        return sum(answer.path == "disaggregated" and answer.headers["x-twinpool-decode"] == worker for answer in answers)

    def swap(*, prefill: str, decode: str) -> None:
        """And wait until the new pair has answered."""
        before = disaggregated(decode=decode)
        service.set_role(prefill, "prefill")
        service.set_role(decode, "decode")
        enough_answers = before + CLIENTS
        until(lambda: disaggregated(decode=decode) >= enough_answers, within_s=240, story=lambda: service.state()["decisions"])

    with ThreadPoolExecutor(CLIENTS) as clients:
        asking = [clients.submit(keep_asking) for _ in range(CLIENTS)]
        try:
            until(lambda: len(answers) >= CLIENTS, within_s=240)
            swap(prefill=first_decode, decode=first_prefill)
            swap(prefill=first_prefill, decode=first_decode)
        finally:
            enough.set()
        for one in asking:
            one.result()  # raises what a client got

    for answer in answers:
        assert answer.content["usage"]["completion_tokens"] == TOKENS
        assert answer.text
    assert {name: service.worker(name)["incarnation"] for name in service.engines} == incarnations
    service.wait_until_idle(within_s=60)
