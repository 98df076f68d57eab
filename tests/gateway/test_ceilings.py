"""No request may use up an engine alone; what is over a ceiling is told which, and no engine hears of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.house import CHAT, chat, house

from twinpool.config import Ceilings
from twinpool.errors import BadRequestError
from twinpool.gateway.ceilings import check_ceilings, depth
from twinpool.handoff.body import take_apart


def check(ceilings: Ceilings = Ceilings(), **fields: Any) -> None:  # noqa: B008
    check_ceilings(take_apart(json.dumps(fields).encode()), ceilings)


def nested(levels: int) -> Any:
    return json.loads("[" * levels + "]" * levels)


@pytest.mark.parametrize(
    ("field", "allowed", "too_much"),
    [
        ("n", 128, 129),
        ("n", "3", "100000"),
        ("best_of", 2, 1e9),
        ("logprobs", True, 21),
        ("top_logprobs", 20, -1),
        ("prompt_logprobs", 20, 21),
        ("prompt_logprobs", 0, -1),
        ("temperature", 2.0, 1e9),
        ("temperature", 0, 10**400),
        ("stop", ["a"] * 256, ["a"] * 257),
        ("bad_words", None, ["a"] * 257),
        ("logit_bias", {"1": 2}, {str(index): 1 for index in range(4097)}),
        ("guided_regex", "a+", "a" * 5000),
        ("regex", "a+", "a" * 5000),
        ("guided_grammar", "x", "x" * 70_000),
        ("ebnf", "x", "x" * 70_000),
        ("guided_json", {"type": "object"}, {"x": "y" * 300_000}),
        ("response_format", {"type": "json_object"}, {"type": "json_schema", "json_schema": nested(70)}),
        ("json_schema", "{}", "y" * 300_000),
        ("guided_choice", ["a", "b"], ["a"] * 5000),
        ("structured_outputs", {"regex": "a+"}, {"regex": "a" * 5000}),
        ("structured_outputs", {"json": {}}, {"json": nested(70)}),
        ("structured_outputs", "no object", {"choice": ["a"] * 5000}),
        ("tools", [{"function": {"name": "f"}}], [nested(70)]),
    ],
)
def test_over_its_ceiling_a_field_is_refused_by_name(field: str, allowed: Any, too_much: Any) -> None:
    check(**{field: allowed})
    with pytest.raises(BadRequestError, match=rf"{field}.* at most .* \(limits\.") as refused:
        check(**{field: too_much})
    assert str(refused.value.param).startswith(field)


def test_a_ceiling_can_be_moved_and_taken_away() -> None:
    with pytest.raises(BadRequestError, match=r"max_completion_tokens asks for 11; at most 10"):
        check(Ceilings(max_tokens=10), max_completion_tokens=11)
    check(Ceilings(n=None), n=10**6)
    check(max_tokens=10**6)


@pytest.mark.parametrize("value", [None, "three", [], {}, "", -5])
def test_what_is_wrong_in_another_way_is_the_engines_to_judge(value: Any) -> None:
    check(n=value, temperature=value, best_of=value)


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_depth_counts_levels_and_no_brackets_in_texts(value: Any) -> None:
    def levels(part: Any) -> int:
        if isinstance(part, dict):
            part = list(part.values())
        return 1 + max(map(levels, part), default=0) if isinstance(part, list) else 0

    assert depth(json.dumps(value).encode()) == levels(value)


# Media


def image(url: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]


DATA_ONLY = Ceilings(media_domains=())
ONE_HOST = Ceilings(media_domains=("media.example",))


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "DATA:,x"])
def test_data_may_always_be_sent(url: str) -> None:
    check(DATA_ONLY, messages=image({"url": url}))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "https://media.example.evil/",
        "https://media.example@evil/",
        "https://evil\\@media.example/",
        "https://evil/?media.example",
        "//media.example/x",
        "ftp://media.example/",
        " data:x",
        "http://[",
        "https://media.example\n.evil/",
    ],
)
def test_with_a_policy_no_other_url_passes(url: str) -> None:
    for shape in (url, {"url": url}):
        with pytest.raises(BadRequestError, match=r"limits\.media_domains"):
            check(ONE_HOST, messages=image(shape))
        check(messages=image(shape))


@pytest.mark.parametrize("url", ["https://media.example/a.png", "http://MEDIA.example:8080/a"])
def test_hosts_of_the_list_may_be_fetched_from(url: str) -> None:
    check(ONE_HOST, messages=image({"url": url}))
    with pytest.raises(BadRequestError):
        check(DATA_ONLY, messages=image({"url": url}))


def test_a_url_hides_nowhere() -> None:
    inner = {"role": "tool", "content": [{"x": {"video_url": {"url": "http://127.0.0.1/"}}}]}
    with pytest.raises(BadRequestError):
        check(DATA_ONLY, messages=[inner])


# Over the wire


async def test_no_engine_hears_of_what_is_refused() -> None:
    async with house(prefill=1, decode=1) as h:
        for field, value in (("n", 100_000), ("prompt_logprobs", -1), ("guided_regex", "a" * 5000)):
            answer = await h.ask(CHAT, chat() | {field: value})
            assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", field)
        assert h.p.recorded == h.d.recorded == []
        assert await h.metric("twinpool_requests_total", outcome="turned_away") == 3
