"""What is learnt of engines outlasts the gateway, for engines of the same kind; and nobody waits for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.house import house

from twinpool.config import Balance, BalanceMode, Routing, RoutingPolicy
from twinpool.engines.scripted import Script
from twinpool.gateway.learnt_file import Learnt, read_learnt, write_learnt

AUTO: dict[str, Any] = {"balance": Balance(mode=BalanceMode.AUTO), "routing": Routing(policy=RoutingPolicy.LEAST_COST)}


def script(**more: Any) -> Script:
    return Script(prefill_s_per_token=0.002, token_interval_s=0.002, **more)


async def teach(path: Path) -> None:
    async with house(colocated=script(), learnt=path, **AUTO) as h:
        for n in range(40):
            assert (await h.chat(f"n{n}", stream=True)).status == 200


async def test_the_next_start_knows_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "learnt"
    await teach(path)
    assert [file.name for file in path.parent.iterdir()] == ["learnt"], "whole, and nothing beside it"
    async with house(colocated=script(), learnt=path, **AUTO) as h:
        await h.chat("n1", stream=True)
        decision = (await h.get(f"{h.admin_url}/admin/decisions")).json()["decisions"][0]
        assert decision["predicted_ttft_s"] > 0.003, "four tokens are read in 8 ms"
    # the house has replayed both journals: the second one's header has what the first one learnt


async def test_of_another_model_it_knows_nothing_and_the_first_is_not_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "learnt"
    await teach(path)
    async with house(colocated=script(models=("other",)), learnt=path, **AUTO) as h:
        await h.chat("n1", stream=True, model="other")
        decision = (await h.get(f"{h.admin_url}/admin/decisions")).json()["decisions"][0]
        assert decision["predicted_ttft_s"] is None
        for n in range(40):
            assert (await h.chat(f"n{n}", stream=True, model="other")).status == 200
    kinds = sorted(json.loads(path.read_bytes())["costs"])
    assert len(kinds) == 2
    assert sum(" other " in kind for kind in kinds) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"format":2,"costs":{},"prompt_lengths":{}}',
        b'{"format":1,"prompt_lengths":{"ascii_tokens_per_char":-1.0}}',
        b'{"format":1,"costs":{"x":{"read_s":1}}}',
        b"\xff\xfe",
    ],
)
async def test_what_cannot_be_read_is_learnt_anew_and_said(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "learnt"
    path.write_bytes(text)
    async with house(colocated=script(), learnt=path, **AUTO) as h:
        assert "learnt anew" in h.news[0]
        assert (await h.chat("n1")).status == 200


async def test_a_folder_that_takes_no_file_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with house(colocated=script(), learnt=tmp_path / "file" / "learnt", **AUTO) as h:
        for n in range(40):
            assert (await h.chat(f"n{n}", stream=True)).status == 200
        await h.gateway._learnt.write()  # type: ignore[union-attr]
        await h.gateway._learnt.write()  # type: ignore[union-attr]
        assert sum("cannot be kept" in news for news in h.news) == 1


async def test_with_balance_off_nothing_is_learnt_or_kept(tmp_path: Path) -> None:
    async with house(colocated=script(), learnt=tmp_path / "learnt") as h:
        for n in range(40):
            await h.chat(f"n{n}", stream=True)
    assert not (tmp_path / "learnt").exists()


def test_a_file_is_replaced_and_never_half_written(tmp_path: Path) -> None:
    path = tmp_path / "learnt"
    write_learnt(path, Learnt(prompt_lengths={"error_ratio": 0.5}))
    write_learnt(path, Learnt(prompt_lengths={"error_ratio": 0.25}))
    assert read_learnt(path, pytest.fail).prompt_lengths == {"error_ratio": 0.25}
    assert read_learnt(tmp_path / "none", pytest.fail) == Learnt()
