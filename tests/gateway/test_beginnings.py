"""Prompts that begin alike go where their beginning was read; what a client may not share is another beginning."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.house import CHAT, House, house, until

from twinpool.config import Routing, RoutingPolicy
from twinpool.core.law import CostPrior
from twinpool.engines.scripted import Script
from twinpool.gateway.beginnings import Beginnings
from twinpool.gateway.learnt_file import Learnt, write_learnt
from twinpool.gateway.openai import Endpoint, read_call
from twinpool.gateway.senders import Sender

KNOWN = Beginnings()
SYSTEM = "You are a careful assistant. " * 200  # 5,800 letters: two whole blocks, and a part


def body(question: str, **fields: Any) -> bytes:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return json.dumps({"model": "scripted", "messages": messages, **fields}).encode()


TENANT = Sender("t")


def named(question: str = "Why?", sender: Sender = TENANT, known: Beginnings | None = KNOWN, **fields: Any) -> tuple[int, ...]:
    return read_call(Endpoint.CHAT, body(question, **fields), sender=sender, beginnings=known).facts.prefix


def test_prompts_that_begin_alike_have_the_same_names_up_to_there() -> None:
    first, other = named("Why? " * 1000), named("How? " * 1000)
    assert len(first) == len(other) == 5
    assert first[:2] == other[:2] == named("Why?")
    assert not set(first[2:]) & set(other[2:])


@pytest.mark.parametrize(
    "other",
    [
        named(sender=Sender("somebody else")),
        named(model="scripted-lora"),
        named(cache_salt="mine"),
        named(tools=[{"type": "function", "function": {"name": "f"}}]),
        named(known=Beginnings()),  # another start: nobody can try prompts against a journal
    ],
)
def test_what_is_not_shared_has_other_names(other: tuple[int, ...]) -> None:
    assert len(other) == 2
    assert not set(named()) & set(other)


def test_short_prompts_long_ones_and_lists_of_them() -> None:
    assert read_call(Endpoint.CHAT, b'{"model":"m","messages":[{"content":"short"}]}', beginnings=KNOWN).facts.prefix == ()
    assert len(named("x" * 1_000_000)) == 64
    lists = json.dumps({"model": "m", "prompt": ["a" * 5000, "b" * 5000]}).encode()
    assert read_call(Endpoint.COMPLETIONS, lists, beginnings=KNOWN).facts.prefix == ()
    text = json.dumps({"model": "m", "prompt": "a" * 5000}).encode()
    assert len(read_call(Endpoint.COMPLETIONS, text, beginnings=KNOWN).facts.prefix) == 2


def test_without_the_law_nothing_is_named() -> None:
    assert named(known=None) == ()


PRIOR = CostPrior(
    read_s=0.0,
    read_token_s=1e-4,
    read_pair_s=0.0,
    step_s=0.001,
    step_sequence_s=0.0,
    step_kv_token_s=0.0,
    mixed_s=0.0,
    mixed_token_s=1e-4,
)
LAW = Routing(policy=RoutingPolicy.LEAST_COST)


async def asked(h: House, question: str) -> str:
    answer = await h.ask(CHAT, body(question))
    assert answer.status == 200
    return answer.headers["x-twinpool-decode"]


async def decisions(h: House) -> list[dict[str, Any]]:
    return list((await h.get(f"{h.admin_url}/admin/decisions")).json()["decisions"])


@pytest.fixture
def known_costs(tmp_path: Path) -> Path:
    write_learnt(tmp_path / "learnt", Learnt(costs={"": PRIOR}))
    return tmp_path / "learnt"


async def test_a_prompt_goes_where_its_beginning_was_read(known_costs: Path) -> None:
    steps = asyncio.Semaphore(0)
    async with house(colocated=[Script(steps=steps), Script()], routing=LAW, learnt=known_costs) as h:
        held_up = asyncio.create_task(h.chat("n1", stream=True))
        await until(lambda: h.c.running == 1)
        assert await asked(h, "read there") == "c1"
        for _ in range(16):
            steps.release()
        assert (await held_up).status == 200
        assert [await asked(h, f"and this? {n}") for n in range(3)] == ["c1"] * 3, "c0 has as little to do"
        assert (await decisions(h))[-1]["cached_tokens"] > 500


async def test_what_engines_say_of_their_caches_corrects_the_guess(known_costs: Path) -> None:
    """These cache nothing, and say so."""
    async with house(colocated=1, routing=LAW, learnt=known_costs) as h:
        for n in range(30):
            await asked(h, f"question {n}")
        guesses = [decision["cached_tokens"] for decision in await decisions(h)]
        assert guesses[0] == 0
        assert guesses[1] > 900
        assert guesses[-1] < 0.1 * guesses[1]
