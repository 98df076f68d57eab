"""What the handoff of a long prompt costs beside its prefill, and whether the parts of the TTFT account for all of it."""

import json

import openai
import pytest
from tests.live import prompts, wire
from tests.live.proof import counting, proves_handoff, without_identity
from tests.live.scrape import Scrape
from tests.live.service import Service

pytestmark = pytest.mark.model

PARTS = ("queue", "prefill", "handoff", "first_decode", "handoff_and_first_decode")
ROUNDING_S = 0.001


class Spent:
    """Seconds of TTFT and its parts between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        def grown(name: str, **labels: str) -> float:
            return after.total(name, **labels) - before.total(name, **labels)

        self.requests = grown("twinpool_ttft_seconds_count")
        self.ttft_s = grown("twinpool_ttft_seconds_sum")
        self.long_requests = grown("twinpool_ttft_seconds_count", length_class="long")
        self.parts_s = {part: grown("twinpool_ttft_part_seconds_sum", part=part) for part in PARTS}
        self.handoff_s = grown("twinpool_handoff_seconds_sum")
        self.handoff_bytes = grown("twinpool_handoff_bytes_total")


@pytest.mark.timeout(300, func_only=True)
def test_a_prompt_of_3000_tokens(service: Service) -> None:
    """The handoff costs under 5 % of the prefill, all of it counted: P's saving, the way there, D's taking it up.

    Sent a second time, the prompt lies in P's cache up to its last token but one: all of that TTFT is the handoff, one decode
    step on each side and the gateway, and so an upper bound. The prompt is given in tokens, cut to whole blocks of the cache.
    """
    identity = wire.ask(service.prefill.url, "GET", "/twinpool/identity").json()
    block = identity["reuse_block_tokens"]
    tokens = 3000 // block * block + 2
    body = {
        "model": service.model,
        "prompt": prompts.tokens(tokens),
        "temperature": 0,
        "max_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = service.scrape()
    cold, computed = counting(service, lambda: wire.post(service.url, "completions", body))
    between = service.scrape()
    warm = wire.post(service.url, "completions", body)
    end = service.scrape()
    assert cold.status == warm.status == 200
    for answer in (cold, warm):
        assert answer.headers["x-twinpool-path"] == "disaggregated"
        usage = json.loads(answer.events()[-2])["usage"]
        assert usage["prompt_tokens"] == tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == tokens - 2
    assert proves_handoff(computed, tokens)

    first, second = Spent(start, between), Spent(between, end)
    for spent in (first, second):
        assert spent.requests == spent.long_requests == 1
        assert sum(spent.parts_s.values()) == pytest.approx(spent.ttft_s, abs=ROUNDING_S)
        assert spent.parts_s["handoff_and_first_decode"] == 0, "our worker tells them apart"
        assert spent.parts_s["handoff"] > 0
        assert spent.parts_s["first_decode"] > 0
        assert spent.handoff_s == pytest.approx(spent.parts_s["handoff"], abs=ROUNDING_S)
        assert spent.handoff_bytes >= (tokens - 1) * identity["kv_bytes_per_token"]
    prefill_s = first.parts_s["prefill"]
    print(f"prefill {prefill_s:.2f} s; handoff {first.parts_s['handoff']:.3f} s, at most {second.ttft_s:.3f} s in all")  # noqa: T201  # shown when it fails
    assert first.parts_s["handoff"] < 0.05 * prefill_s
    assert second.ttft_s < 0.05 * prefill_s

    reference, computed = counting(
        service, lambda: wire.post(service.decode.url, "completions", {**body, "cache_prompt": False})
    )
    assert computed == (0, tokens)
    assert without_identity(cold, stream=True) == without_identity(reference, stream=True)


@pytest.mark.timeout(60, func_only=True)
def test_the_parts_add_up_to_the_ttft(client: openai.OpenAI, service: Service) -> None:
    """For every streamed answer, whichever way it went; and a client that closes its socket at `[DONE]` counts, too."""
    before = service.scrape()
    for n in (1, 2, 1):
        for stream in (True, False):
            answer = client.completions.create(model=service.model, prompt=prompts.text(30), max_tokens=3, stream=stream, n=n)
            if stream:
                list(answer)
    service.wait_until_idle()
    after = service.scrape()
    spent = Spent(before, after)
    assert spent.requests == 3
    assert spent.long_requests == 0
    assert sum(spent.parts_s.values()) == pytest.approx(spent.ttft_s, abs=ROUNDING_S)

    def ended(outcome: str, path: str) -> float:
        labels = {"outcome": outcome, "path": path}
        return after.total("twinpool_requests_total", **labels) - before.total("twinpool_requests_total", **labels)

    assert ended("ok", "disaggregated") == 4
    assert ended("ok", "colocated") == 2
    assert ended("client_left", "disaggregated") == ended("client_left", "colocated") == 0
    # and for all that this service has answered so far
    parts_s = sum(after.total("twinpool_ttft_part_seconds_sum", part=part) for part in PARTS)
    assert parts_s == pytest.approx(after.total("twinpool_ttft_seconds_sum"), abs=ROUNDING_S)
