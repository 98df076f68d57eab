"""What can be wrong with a service, each in one line that a person understands."""

import socket

import pytest
from tests.bench.service import event, token, told

from twinpool.bench.prepare import prepare
from twinpool.bench.target import message_of, target_of, unreachable
from twinpool.engines.scripted import Recorded, Reply, ScriptedEngine
from twinpool.errors import UserError
from twinpool.http1 import Loss, Pool, UpstreamLost
from twinpool.workload.offered import Offered


async def complaint(url: str, model: str | None = None, **options: object) -> str:
    pool = Pool()
    try:
        with pytest.raises(UserError) as said:
            await prepare(pool, target_of(url, **options), model, timeout_s=5)  # type: ignore[arg-type]
    finally:
        await pool.close()
    assert "\n" not in str(said.value)
    return str(said.value)


async def test_nobody_there(engine: ScriptedEngine) -> None:
    await engine.stop()
    said = await complaint(engine.url)
    assert said == f"nobody answers at {engine.url} (connection refused): is the service running, and the URL right?"


async def test_a_wrong_model_is_told_which_there_are(engine: ScriptedEngine) -> None:
    assert await complaint(engine.url, "gpt-9") == f"the model 'gpt-9' does not exist at {engine.url}: it has scripted"


async def test_several_models_are_a_choice(engine: ScriptedEngine) -> None:
    engine.script.models = ("one", "two")
    assert "choose one with --model (one, two)" in await complaint(engine.url)


@pytest.mark.parametrize(("api_key", "why"), [(None, "it wants a key"), ("sk-old", "the key is refused")])
async def test_a_key_that_is_missing_or_expired(engine: ScriptedEngine, api_key: str | None, why: str) -> None:
    engine.script.api_key = "sk-new"
    said = await complaint(engine.url, api_key=api_key)
    assert f"answers 401, {why}: give a valid one with --api-key-file" in said
    assert "sk-" not in said


async def test_a_service_that_takes_no_more(engine: ScriptedEngine) -> None:
    engine.script.on_request = lambda recorded: Reply.error(429, "quota exceeded", headers=((b"retry-after", b"20"),))
    said = await complaint(engine.url)
    assert 'answers 429, it takes no more requests now (Retry-After 20 s): try again later ("quota exceeded")' in said


async def test_a_stream_without_usage(engine: ScriptedEngine) -> None:
    finish = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    engine.script.on_request = lambda recorded: Reply.stream(token(), finish, b"data: [DONE]\n\n")
    assert "tells no usage in its streams" in await complaint(engine.url)


async def test_a_service_that_breaks(engine: ScriptedEngine) -> None:
    engine.script.on_request = lambda recorded: Reply.error(500, "CUDA error")
    assert await complaint(engine.url) == f'{engine.url} answers 500 ("CUDA error")'
    engine.script.on_request = lambda recorded: Reply.stream(token())
    assert "did not answer a short question well: truncated (the stream ended without [DONE])" in await complaint(engine.url)


async def test_another_kind_of_service(engine: ScriptedEngine) -> None:
    assert "is this the URL of an OpenAI-compatible service?" in await complaint(f"{engine.url}/nothing/here")


@pytest.mark.parametrize("text", ["", "http://", "ftp://host", "http://a b", "http://host:port", "http://user@host"])
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(UserError, match="write http://host:port"):
        target_of(text)


@pytest.mark.parametrize("text", ["http://user:secret@h:1", "user:secret@h:1", "http://h\x1b@secret@h"])
def test_a_password_in_a_url_is_not_told(text: str) -> None:
    with pytest.raises(UserError) as said:
        target_of(text)
    assert "secret" not in str(said.value)


@pytest.mark.parametrize(
    ("text", "shown", "path"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", "/v1/chat/completions"),
        ("http://h:1/", "http://h:1", "/v1/chat/completions"),
        ("http://h/v1", "http://h:80", "/v1/chat/completions"),
        ("https://h/openai/v1/", "https://h:443", "/openai/v1/chat/completions"),
        ("https://h/v1/chat/completions", "https://h:443", "/v1/chat/completions"),
        ("http://[::1]:9", "http://[::1]:9", "/v1/chat/completions"),
    ],
)
def test_urls_as_people_paste_them(text: str, shown: str, path: str) -> None:
    target = target_of(text)
    assert (str(target.origin), target.path) == (shown, path)


async def test_a_service_that_refuses_unknown_fields_is_asked_without(engine: ScriptedEngine) -> None:
    def answers(recorded: Recorded) -> Reply:
        return (
            Reply.error(400, "unknown field ignore_eos")
            if "ignore_eos" in recorded.body
            else told(2, prompt_tokens=len(str(recorded.body).split()))
        )

    engine.script.on_request = answers
    pool = Pool()
    found = await prepare(pool, target_of(engine.url), None, timeout_s=5)
    await pool.close()
    assert "ignore_eos" not in found.fields
    assert "does not take ignore_eos" in found.notes[0]


async def test_a_service_whose_count_does_not_rise_with_the_prompt(engine: ScriptedEngine) -> None:
    engine.script.on_request = lambda recorded: told(2, prompt_tokens=40)
    said = await complaint(engine.url)
    assert f"{engine.url} counts 40 prompt tokens for 8 words and 40 for 156: its usage is wrong" in said


async def test_it_learns_the_template_and_the_rate_and_asks_little(engine: ScriptedEngine) -> None:
    engine.script.on_request = lambda recorded: told(2, prompt_tokens=31 + 2 * len(recorded.body["prompt"].split()))
    pool = Pool()
    found = await prepare(pool, target_of(engine.url, is_chat=False), None, timeout_s=5)
    await pool.close()
    assert (found.prompts.base_tokens, found.prompts.tokens_per_word) == pytest.approx((31, 2))
    assert len(engine.recorded) == 2
    assert found.prompts.fewest_tokens == 33


async def test_the_rate_is_that_of_long_prompts_however_uneven_words_are(engine: ScriptedEngine) -> None:
    """BM-06: a word has as many tokens as letters. Whichever words come first, 20,000 tokens are asked for and had."""

    def letters(recorded: Recorded) -> int:
        return len(recorded.body["prompt"].replace(" ", ""))

    engine.script.on_request = lambda recorded: told(2, prompt_tokens=letters(recorded))
    for _ in range(5):
        pool = Pool()
        found = await prepare(pool, target_of(engine.url, is_chat=False), None, timeout_s=5)
        await pool.close()
        text = found.prompts.text(Offered(0.0, 20_000, 1, is_long=True))
        assert len(text.replace(" ", "")) == pytest.approx(20_000, rel=0.005)


def test_what_a_service_says_is_one_line_of_bounded_length() -> None:
    assert message_of(b'{"error": {"message": "no\\nmore"}}') == "no more"
    assert len(message_of(b'{"error": "%b"}' % (b"x" * 5000))) == 200


def test_an_unknown_host_is_told_in_the_resolver_s_words() -> None:
    lost = UpstreamLost(Loss.CONNECT, "h")
    lost.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert "(name or service not known)" in str(unreachable(target_of("h"), lost))
