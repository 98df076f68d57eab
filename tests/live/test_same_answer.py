"""At temperature 0 an answer whose prompt another worker has read equals the one that a single worker gives, byte for byte.

Each case runs the handoff first, through the gateway, and the reference after it: the same request, straight to the decode
worker, without a handle and without any cache. Each proves by the workers' own counters that the KV moved: the decode worker
computed one prompt token at most.
"""

import pytest
from tests.live import prompts, wire
from tests.live.proof import counting, proves_handoff, without_identity
from tests.live.service import Service

pytestmark = pytest.mark.model

SHORT_TOKENS = (20, 90, 250)
NEW_TOKENS = 24


def check_same_answer(service: Service, path: str, tokens: int, *, stream: bool) -> int:
    """Compares the two ways; gives the prompt's true length."""
    body = prompts.body(path, tokens, model=service.model, max_tokens=NEW_TOKENS)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    handed_over, computed = counting(service, lambda: wire.post(service.url, path, body))
    assert handed_over.status == 200, handed_over.body
    assert handed_over.headers["x-twinpool-path"] == "disaggregated"
    assert handed_over.headers["x-twinpool-prefill"] == service.prefill.id
    assert handed_over.headers["x-twinpool-decode"] == service.decode.id
    found = without_identity(handed_over, stream=stream)
    usage = found[-1]["usage"]
    assert proves_handoff(computed, usage["prompt_tokens"]), (computed, usage)

    reference, computed = counting(service, lambda: wire.post(service.decode.url, path, {**body, "cache_prompt": False}))
    assert computed == (0, usage["prompt_tokens"]), "the reference was to compute all of the prompt in one place"
    assert found == without_identity(reference, stream=stream)
    assert usage["completion_tokens"] > 1
    return int(usage["prompt_tokens"])


@pytest.mark.timeout(30, func_only=True)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("tokens", SHORT_TOKENS)
def test_short_prompts(service: Service, path: str, tokens: int, *, stream: bool) -> None:
    assert 0.7 * tokens <= check_same_answer(service, path, tokens, stream=stream) <= 1.3 * tokens + 15


@pytest.mark.timeout(300, func_only=True)
@pytest.mark.parametrize(
    ("path", "tokens", "stream"),
    [("completions", 1500, False), ("chat/completions", 6000, True)],
    ids=["1500", "6000"],
)
def test_long_prompts(service: Service, path: str, tokens: int, *, stream: bool) -> None:
    """The one of 3,000 tokens is in `test_handoff_cost`."""
    assert 0.97 * tokens <= check_same_answer(service, path, tokens, stream=stream) <= 1.03 * tokens


@pytest.mark.timeout(30, func_only=True)
def test_the_proof_fails_without_the_handle(service: Service) -> None:
    """A decode worker that gets no handle computes the whole prompt: the counter that proves the handoff sees it."""
    body = prompts.body("chat/completions", 200, model=service.model, max_tokens=4)
    answer, computed = counting(service, lambda: wire.post(service.decode.url, "chat/completions", body))
    prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    assert computed == (0, prompt_tokens)
    assert not proves_handoff(computed, prompt_tokens)
