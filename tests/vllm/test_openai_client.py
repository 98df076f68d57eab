"""The `openai` client as it comes from the index, against stock vLLM behind Twinpool: what holds for the embedded engine, and
what only an engine with tools and structured output can do."""

import json
from typing import Any

import openai
import pytest
from tests.live import prompts
from tests.live.test_openai_client import check_twice, check_usage, few_shots
from tests.vllm.engine import MODEL
from tests.vllm.service import Front

pytestmark = pytest.mark.vllm

CAPITAL = "The capital of France is"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "is_large": {"type": "boolean"}},
    "required": ["city", "is_large"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Facts about a city.",
        "strict": True,  # without it vLLM holds the model to a call, but not to its arguments
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def last_path(service: Front) -> str:
    """Which way the newest request went."""
    choice: str = service.state()["decisions"][-1]["choice"]
    return choice


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such-model")


def test_chat(client: openai.OpenAI, service: Front) -> None:
    messages = few_shots("What is the capital of France?")
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Paris"
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    check_usage(answer.usage, completion_tokens=range(1, 9))
    assert last_path(service) == "disaggregated"


def test_chat_streamed(client: openai.OpenAI, service: Front) -> None:
    messages = few_shots("What is the capital of France?")
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Paris"
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert last.choices == []
    check_usage(last.usage, completion_tokens=range(1, 9))
    assert last_path(service) == "disaggregated"


def test_a_stream_tells_its_usage_only_when_asked(client: openai.OpenAI) -> None:
    messages = few_shots("What is the capital of Peru?")
    chunks = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_completions(client: openai.OpenAI, service: Front, *, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": CAPITAL, "temperature": 0, "max_tokens": 2}
    if stream:
        *pieces, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        assert "".join(piece.choices[0].text for piece in pieces) == " Paris."
        check_usage(last.usage, completion_tokens=range(2, 3))
    else:
        answer = client.completions.create(**asked)
        assert answer.choices[0].text == " Paris."
        assert answer.choices[0].finish_reason == "length"
        check_usage(answer.usage, completion_tokens=range(2, 3))
    assert last_path(service) == "disaggregated"


def test_two_choices_are_one_engine_s(client: openai.OpenAI, service: Front) -> None:
    """One handle serves one answer."""
    prompt = prompts.text(20)
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0.7, "seed": 7, "max_tokens": 6}
    one = client.completions.create(**asked)
    two = client.completions.create(**asked, n=2)
    assert [choice.index for choice in two.choices] == [0, 1]
    check_twice(one.usage, two.usage)
    assert service.state()["decisions"][-1]["why"] == "n_choices"


def test_a_list_of_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[CAPITAL, "The capital of Italy is"], temperature=0, max_tokens=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, " Paris"), (1, " Rome")]


@pytest.mark.parametrize("stop", ["5", ["nothing like it", " 5"]], ids=["text", "list"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_stop(client: openai.OpenAI, stop: str | list[str], *, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3,", "temperature": 0, "max_tokens": 20, "stop": stop}
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    else:
        choices = list(client.completions.create(**asked).choices)
    assert "".join(choice.text for choice in choices).rstrip(" ") == " 4,"
    assert choices[-1].finish_reason == "stop"


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": prompts.text(5)}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=3, temperature=0)
    check_usage(answer.usage, completion_tokens=range(3, 4))


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": few_shots("What is the capital of France?"), "temperature": 0}
    answer = client.chat.completions.create(**asked, max_tokens=8, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(other.logprob for other in token.top_logprobs)


def test_seed(client: openai.OpenAI) -> None:
    prompt = prompts.text(20)

    def answer(seed: int) -> str:
        asked: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 1.5, "max_tokens": 12}
        return client.completions.create(**asked, seed=seed).choices[0].text

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_response_format(client: openai.OpenAI, service: Front, *, stream: bool) -> None:
    """The grammar begins with the answer's first token, which decode writes: prefill's is dropped."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": few_shots("What is the capital of France, and is it large? Answer in JSON."),
        "temperature": 0,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
    }
    if stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
        said = "".join(pieces)
    else:
        said = client.chat.completions.create(**asked).choices[0].message.content or ""
    answer = json.loads(said)
    assert set(answer) == {"city", "is_large"}
    assert answer["city"] in ("Paris", "Rome")
    assert last_path(service) == "disaggregated"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}], ids=["any", "named"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_that_must_be_called(client: openai.OpenAI, service: Front, choice: Any, *, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "Is Paris a large city?"}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 100}
    asked |= {"tools": [TOOL], "tool_choice": choice}
    if stream:
        calls = [
            call
            for chunk in client.chat.completions.create(**asked, stream=True)
            for call in chunk.choices[0].delta.tool_calls or []
        ]
        names = "".join(call.function.name or "" for call in calls if call.function)
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    else:
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
        assert call.type == "function"
        names, arguments = call.function.name, call.function.arguments
    assert names == "look_up"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert last_path(service) == "disaggregated"


def test_tools_that_may_be_called(client: openai.OpenAI, service: Front) -> None:
    messages: Any = [{"role": "user", "content": prompts.text(10)}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="auto")
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    assert last_path(service) == "disaggregated"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}}, ""),
    ],
    ids=["temperature", "max_tokens", "schema"],
)
def test_what_the_engine_refuses_is_the_client_s_answer(client: openai.OpenAI, fields: dict[str, Any], names: str) -> None:
    messages: Any = [{"role": "user", "content": prompts.text(10)}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=messages, **fields)
    assert names in refused.value.message


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hello"}])
    assert refused.value.code == "model_not_found"
