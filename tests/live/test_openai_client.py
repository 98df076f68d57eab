"""The `openai` client as it comes from the index, against the real model: nothing in it knows of Twinpool."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam
from tests.live.prompts import text
from tests.live.service import Service

pytestmark = [pytest.mark.model, pytest.mark.timeout(30, func_only=True)]

CAPITAL = "The capital of France is"
MANY_SCRIPTS = "Привет, 你好, नमस्ते, שלום 👩🏽‍🚀🇯🇵🎉"


@pytest_asyncio.fixture
async def async_client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def few_shots(question: str) -> list[ChatCompletionMessageParam]:
    """A small model answers well in a form that it has just seen."""
    return [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": "What is the capital of Italy?"},
        {"role": "assistant", "content": "Rome"},
        {"role": "user", "content": "What is the capital of Spain?"},
        {"role": "assistant", "content": "Madrid"},
        {"role": "user", "content": question},
    ]


def saying(words: str) -> dict[str, Any]:
    """A field of llama.cpp that no OpenAI client and no gateway knows: with it the answer is these words."""
    return {"grammar": f'root ::= "{words}"'}


def test_one_model(client: openai.OpenAI, service: Service) -> None:
    assert client.models.retrieve(service.model).id == service.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such-model")


def test_models(client: openai.OpenAI, service: Service) -> None:
    assert [model.id for model in client.models.list()] == [service.model]


def test_chat(client: openai.OpenAI, service: Service) -> None:
    answer = client.chat.completions.create(
        model=service.model, messages=few_shots("What is the capital of France?"), temperature=0, max_tokens=8
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Paris"
    assert choice.finish_reason == "stop"
    assert answer.model == service.model
    assert answer.object == "chat.completion"
    check_usage(answer.usage, completion_tokens=range(1, 9))


def test_chat_streamed(client: openai.OpenAI, service: Service) -> None:
    chunks = list(
        client.chat.completions.create(
            model=service.model,
            messages=few_shots("What is the capital of France?"),
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Paris"
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.model for chunk in chunks} == {service.model}
    assert last.choices == []
    assert all(piece.usage is None for piece in pieces)
    check_usage(last.usage, completion_tokens=range(1, 9))


def test_a_stream_tells_its_usage_only_when_asked(client: openai.OpenAI, service: Service) -> None:
    chunks = client.chat.completions.create(
        model=service.model, messages=few_shots("What is the capital of Peru?"), max_tokens=2, stream=True
    )
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_completions(client: openai.OpenAI, service: Service) -> None:
    answer = client.completions.create(model=service.model, prompt=CAPITAL, temperature=0, max_tokens=2)
    (choice,) = answer.choices
    assert choice.text == " Paris."
    assert choice.finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.model == service.model
    check_usage(answer.usage, completion_tokens=range(2, 3))


def test_completions_streamed(client: openai.OpenAI, service: Service) -> None:
    *pieces, last = client.completions.create(
        model=service.model,
        prompt=CAPITAL,
        temperature=0,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    assert "".join(piece.choices[0].text for piece in pieces) == " Paris."
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    check_usage(last.usage, completion_tokens=range(2, 3))


async def test_async(async_client: openai.AsyncOpenAI, service: Service) -> None:
    messages = few_shots("What is the capital of France?")
    answer = await async_client.chat.completions.create(model=service.model, messages=messages, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == "Paris"
    stream = await async_client.chat.completions.create(
        model=service.model, messages=messages, temperature=0, max_tokens=8, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Paris"
    completion = await async_client.completions.create(model=service.model, prompt=CAPITAL, temperature=0, max_tokens=2)
    assert completion.choices[0].text == " Paris."


def test_two_chat_choices(client: openai.OpenAI, service: Service) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text(20)}]
    one = client.chat.completions.create(model=service.model, messages=messages, temperature=0, max_tokens=6)
    two = client.chat.completions.create(model=service.model, messages=messages, temperature=0, max_tokens=6, n=2)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert {choice.message.content for choice in two.choices} == {one.choices[0].message.content}
    assert {choice.finish_reason for choice in two.choices} == {one.choices[0].finish_reason}
    check_twice(one.usage, two.usage)

    *pieces, last = client.chat.completions.create(
        model=service.model,
        messages=messages,
        temperature=0,
        max_tokens=6,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, ends = ["", ""], ["", ""]
    for piece in pieces:
        (choice,) = piece.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in two.choices]
    assert ends == [choice.finish_reason for choice in two.choices]
    check_twice(one.usage, last.usage)


def test_two_completion_choices(client: openai.OpenAI, service: Service) -> None:
    prompt = text(20)
    one = client.completions.create(model=service.model, prompt=prompt, temperature=0, max_tokens=6)
    two = client.completions.create(model=service.model, prompt=prompt, temperature=0, max_tokens=6, n=2)
    assert [(choice.index, choice.text) for choice in two.choices] == [(0, one.choices[0].text), (1, one.choices[0].text)]
    check_twice(one.usage, two.usage)

    *pieces, last = client.completions.create(
        model=service.model,
        prompt=prompt,
        temperature=0,
        max_tokens=6,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", ""]
    for piece in pieces:
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == [choice.text for choice in two.choices]
    check_twice(one.usage, last.usage)


def test_a_list_of_prompts(client: openai.OpenAI, service: Service) -> None:
    listed = [CAPITAL, "The capital of Italy is"]
    alone = [client.completions.create(model=service.model, prompt=prompt, temperature=0, max_tokens=1) for prompt in listed]
    answer = client.completions.create(model=service.model, prompt=listed, temperature=0, max_tokens=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, " Paris"), (1, " Rome")]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone if one.usage)
    assert answer.usage.completion_tokens == 2


def test_a_prompt_in_tokens(client: openai.OpenAI, service: Service) -> None:
    answer = client.completions.create(model=service.model, prompt=[504, 3575, 282, 4649, 314], temperature=0, max_tokens=1)
    assert answer.choices[0].text == " Paris"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


@pytest.mark.parametrize("stop", ["5", ["nothing like it", " 5"]], ids=["text", "list"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_stop(client: openai.OpenAI, service: Service, stop: str | list[str], *, stream: bool) -> None:
    """The answer ends before the stop text, and no piece of a stream shows the beginning of it."""
    asked: dict[str, Any] = {"model": service.model, "prompt": "1, 2, 3,", "temperature": 0, "max_tokens": 20, "stop": stop}
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    else:
        choices = list(client.completions.create(**asked).choices)
    assert "".join(choice.text for choice in choices).rstrip(" ") == " 4,"
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_one_token(client: openai.OpenAI, service: Service, *, stream: bool) -> None:
    asked: dict[str, Any] = {"model": service.model, "messages": few_shots(text(5)), "temperature": 0, "max_tokens": 1}
    if not stream:
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length"
        check_usage(answer.usage, completion_tokens=range(1, 2))
        return
    *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert sum(bool(piece.choices[0].delta.content) for piece in pieces) == 1
    assert pieces[-1].choices[0].finish_reason == "length"
    check_usage(last.usage, completion_tokens=range(1, 2))


def test_max_completion_tokens(client: openai.OpenAI, service: Service) -> None:
    answer = client.chat.completions.create(
        model=service.model, messages=[{"role": "user", "content": text(5)}], max_completion_tokens=3, temperature=0
    )
    check_usage(answer.usage, completion_tokens=range(3, 4))


@pytest.mark.parametrize("n", [1, 2])
def test_chat_logprobs(client: openai.OpenAI, service: Service, n: int) -> None:
    answer = client.chat.completions.create(
        model=service.model,
        messages=few_shots("What is the capital of France?"),
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
        n=n,
    )
    assert len(answer.choices) == n
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content).decode() == choice.message.content
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3
            assert token.logprob <= 0
            assert token.logprob == max(other.logprob for other in token.top_logprobs)
            assert token.token == token.top_logprobs[0].token


def test_chat_logprobs_streamed(client: openai.OpenAI, service: Service) -> None:
    asked: dict[str, Any] = {
        "model": service.model,
        "messages": few_shots(text(10)),
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
    }
    tokens = [
        token
        for chunk in client.chat.completions.create(**asked, stream=True)
        for choice in chunk.choices
        for token in (choice.logprobs.content or [] if choice.logprobs else [])
    ]
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert tokens == whole.content


@pytest.mark.parametrize("n", [1, 2])
def test_completion_logprobs_in_the_legacy_shape(client: openai.OpenAI, service: Service, n: int) -> None:
    answer = client.completions.create(model=service.model, prompt=CAPITAL, temperature=0, max_tokens=3, logprobs=2, n=n)
    assert len(answer.choices) == n
    for choice in answer.choices:
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        assert found.text_offset is not None
        assert "".join(found.tokens) == choice.text
        assert len(found.tokens) == 3
        assert [max(top, key=top.__getitem__) for top in found.top_logprobs] == found.tokens
        assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
        assert all(len(top) == 2 for top in found.top_logprobs)
        lengths = [len(token) for token in found.tokens]
        assert [offset - found.text_offset[0] for offset in found.text_offset] == [0, lengths[0], lengths[0] + lengths[1]]


@pytest.mark.parametrize("color", ["green", "blue"])
def test_the_system_prompt_is_read(client: openai.OpenAI, service: Service, color: str) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": f"The color of the box is {color}."},
        {"role": "user", "content": "What color is the box?"},
    ]
    answer = client.chat.completions.create(model=service.model, messages=messages, temperature=0, max_tokens=12)
    assert color in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("n", [1, 2])
def test_every_script_and_emoji(client: openai.OpenAI, service: Service, n: int) -> None:
    """One letter can be several tokens: no piece of a stream holds half of one."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"{text(3)} {MANY_SCRIPTS}"}]
    asked: dict[str, Any] = {"model": service.model, "messages": messages, "temperature": 0, "n": n}
    asked |= {"max_tokens": 200, "extra_body": saying(MANY_SCRIPTS)}
    answer = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in answer.choices] == [MANY_SCRIPTS] * n
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    pieces: list[list[str]] = [[] for _ in range(n)]
    for chunk in client.chat.completions.create(**asked, stream=True):
        pieces[chunk.choices[0].index].append(chunk.choices[0].delta.content or "")
    assert ["".join(of_one) for of_one in pieces] == [MANY_SCRIPTS] * n
    assert not any("\ufffd" in piece for of_one in pieces for piece in of_one)


def test_every_script_in_a_completion(client: openai.OpenAI, service: Service) -> None:
    asked: dict[str, Any] = {"model": service.model, "prompt": f"{text(3)} {MANY_SCRIPTS}", "temperature": 0}
    chunks = client.completions.create(**asked, max_tokens=200, stream=True, extra_body=saying(MANY_SCRIPTS))
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == MANY_SCRIPTS
    assert not any("\ufffd" in piece for piece in pieces)


def test_seed(client: openai.OpenAI, service: Service) -> None:
    """The same seed gives the same answer, another seed another; the choices of one request differ."""
    prompt = text(20)

    def answer(seed: int, n: int = 1) -> list[str]:
        asked = client.completions.create(model=service.model, prompt=prompt, temperature=1.5, max_tokens=12, seed=seed, n=n)
        return [choice.text for choice in asked.choices]

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)
    first, second = answer(7, n=2)
    assert first != second


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hello"}])
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"


def check_usage(usage: Any, *, completion_tokens: range) -> None:
    assert usage is not None
    assert usage.prompt_tokens > 0
    assert usage.completion_tokens in completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def check_twice(one: Any, two: Any) -> None:
    """The prompt counts once, the answers both."""
    assert two.prompt_tokens == one.prompt_tokens
    assert two.completion_tokens == 2 * one.completion_tokens
    assert two.total_tokens == two.prompt_tokens + two.completion_tokens
