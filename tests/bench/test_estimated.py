"""The package's answers were recorded from AIConfigurator 0.12.0; where it is installed, it is asked again."""

import importlib.util
import sys
from pathlib import Path

import msgspec
import pytest

from twinpool.bench.estimated import Answers, Asked, ask, profile_of
from twinpool.errors import UserError
from twinpool.profile import parse_profile

ASKED = Asked("meta-llama/Meta-Llama-3.1-8B", "h100_sxm")
RECORDED = msgspec.json.decode((Path(__file__).parent / "aiconfigurator-0.12-llama-8b-h100.json").read_bytes(), type=Answers)
installed = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="AIConfigurator is not installed here"
)


def test_a_profile_of_what_the_database_says() -> None:
    profile = profile_of(ASKED, RECORDED, name="llama-8b")
    assert parse_profile(msgspec.json.encode(profile), "here") == profile  # no holes
    assert (profile.model, profile.engine, profile.system) == (ASKED.model, "vllm 0.24.0", "h100_sxm")
    assert dict(profile.prefill_ms)[4096] == dict(RECORDED.prefill_ms)[4096]
    assert (profile.batches[-1], profile.max_sequences) == (256, 256)
    assert "AIConfigurator 0.12.0" in profile.source


def test_kv_is_counted_over_all_gpus_of_a_worker() -> None:
    one, four = (profile_of(ASKED._replace(tensor_parallel=n), RECORDED, name="x") for n in (1, 4))
    assert four.kv_bytes_per_token == 4 * one.kv_bytes_per_token == 4 * 131_072
    assert four.kv_tokens == one.kv_tokens
    assert four.gpus == 4


def test_what_its_mixed_steps_cost_more_is_said_and_not_taken() -> None:
    answers = msgspec.structs.replace(
        RECORDED,
        prefill_ms=((64, 10.0), (128, 20.0)),
        decode_step_ms=((1, 64, 5.0), (2, 64, 6.0)),
        mixed_ms=((64, 2, 6.0 + 10.0 + 1.5),),  # decode, what 64 tokens more add to a prompt of 2, and the extra
    )
    profile = profile_of(ASKED, answers, name="x")
    assert profile.mixed_step_extra_ms == 0
    assert any("+1.5 ms" in note for note in profile.notes)


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(UserError, match="pip install aiconfigurator"):
        ask(ASKED)


@installed
def test_the_package_still_says_what_was_recorded() -> None:
    found = ask(ASKED)
    if found.package != RECORDED.package:
        pytest.skip(f"another version: {found.package}")
    assert found == RECORDED


@installed
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (ASKED._replace(system="h100"), "no system h100: there are .*h100_sxm"),
        (ASKED._replace(engine="vlm"), "no vlm on h100_sxm: there are sglang"),
        (ASKED._replace(engine_version="0.1"), "no vllm 0.1 on h100_sxm: there are"),
        (ASKED._replace(model="meta-llama/Meta-Llama-3.1-70B"), "does not fit on 1 h100_sxm: .*--tensor-parallel"),
        (ASKED._replace(tensor_parallel=3), "divisible by tp_size 3"),
    ],
)
def test_what_the_package_cannot_tell_is_one_line(asked: Asked, why: str) -> None:
    with pytest.raises(UserError, match=why):
        ask(asked)
