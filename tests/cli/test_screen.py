import json
import shlex
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from twinpool.cli.screen import FirstScreen, core_list, curl, show_first_screen
from twinpool.cli.status_screen import show_status
from twinpool.deploy.devices import Devices
from twinpool.deploy.fabric import choose_fabric


def worker(name: str, **other: Any) -> dict[str, Any]:
    return {
        "id": name,
        "url": "http://127.0.0.1:41234",
        "role": name.split("-")[0],
        "state": "ready",
        "reason": None,
        "engine": "llama.cpp 1",
        "slots": 4,
        "sequences": 0,
        "prefill_tokens": 0,
        "kv_tokens": 0,
    } | other


def state(*workers: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "version": "1.2",
        "uptime_s": 7300.0,
        "gateway": {"url": "http://127.0.0.1:8000", "models": ["m"], "draining": False},
        "workers": list(workers),
        "requests": {"live": 3, "waiting": 1},
        "handles": {"held": 2, "spent": 0},
        "decisions": [],
    } | other


def shown(of: dict[str, Any]) -> str:
    console = Console(width=100, record=True, file=StringIO())
    show_status(console, of)
    return console.export_text()


def test_the_curl_can_be_pasted() -> None:
    words = shlex.split(curl("http://127.0.0.1:8000", "it's a model", needs_key=False).replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's a model"


def test_the_curl_carries_the_key_where_one_is_needed() -> None:
    assert '"Authorization: Bearer $TWINPOOL_API_KEY"' in curl("http://x", "m", needs_key=True)


@pytest.mark.parametrize(("cores", "text"), [((3,), "3"), ((0, 1, 2), "0-2"), ((4, 0, 1), "0-1,4"), ((), "")])
def test_core_lists(cores: tuple[int, ...], text: str) -> None:
    assert core_list(cores) == text


def test_status_shows_what_one_looks_for() -> None:
    decision = {
        "age_s": 2.0,
        "request": "r",
        "choice": "disaggregated",
        "why": "pair_ready",
        "words": "prefill-0 reads, decode-0 writes: both have room",
        "prefill": "prefill-0",
        "decode": "decode-0",
    }
    text = shown(
        state(
            worker("decode-0", sequences=2, kv_tokens=1200),
            worker("prefill-0", state="lost", reason="its process has ended", slots=None),
            decisions=[decision],
        )
    )
    for part in (
        "serving m",
        "up 2 h 1 min",
        "3 live, 1 waiting",
        "2 held",
        "2 of 4",
        "1,200 tokens",
        "prefill-0 is not up: its process has ended",
        "prefill-0 reads, decode-0 writes: both have room",
    ):
        assert part in text, text
    assert text.index("prefill-0") < text.index("decode-0")
    assert "spent" not in text


def test_the_first_screen_says_how_kv_goes_and_what_must_not_be_overlooked() -> None:
    fabric = choose_fabric(Devices(efa=("rdmap79s0",)))
    console = Console(width=200, record=True, file=StringIO())
    screen = FirstScreen(
        1.0,
        "http://127.0.0.1:8001",
        places={"prefill-0": "GPU 0"},
        places_title="Where",
        warnings=("no EFA in sight",),
        fabric=fabric,
        handoff_floor_gb_s=fabric.handoff_floor_gb_s,
    )
    show_first_screen(console, state(worker("prefill-0"), worker("decode-0")), screen)
    text = console.export_text()
    for part in ("LIBFABRIC backend over EFA: 1 EFA device", "under 2 GB/s it counts as slow", "Where", "GPU 0", "any"):
        assert part in text, text
    assert "Warning: no EFA in sight" in text


def test_the_first_screen_names_what_is_down() -> None:
    console = Console(width=100, record=True, file=StringIO())
    show_first_screen(
        console,
        state(worker("prefill-0"), worker("decode-0", state="joining", reason="no connection", engine=None)),
        FirstScreen(2.345, "http://127.0.0.1:8001", notes=("mind the gap",)),
    )
    text = console.export_text()
    for part in (
        "ready after 2.3 s",
        "http://127.0.0.1:8000/v1",
        "decode-0 is not up: no connection",
        "mind the gap",
        "Ctrl-C",
    ):
        assert part in text, text
    assert "twinpool status)" in text


VLLM = {
    "kind": "vllm",
    "engine": "vllm 0.32.0",
    "connector": "nixl",
    "kv_role": "kv_both",
    "lease_s": None,
    "budget_tokens": None,
    "kv_capacity_tokens": 93_184,
    "hands_off": True,
}


def test_status_shows_what_is_known_of_attached_engines_and_why_one_hands_nothing_over() -> None:
    alone = VLLM | {"connector": "none", "kv_role": None, "hands_off": False, "obstacle": "its metrics show no connector"}
    advised = VLLM | {"advice": ["declare lease_s"]}
    text = shown(state(worker("prefill-0", **advised), worker("prefill-1", **advised), worker("decode-0", **alone)))
    assert "nixl, kv_both" in text
    assert "93,184" in text
    assert "assumed" in text
    assert "prefill-0, prefill-1: declare lease_s" in text
    assert "decode-0 hands nothing over: its metrics show no connector" in text


def test_status_says_nothing_of_engines_that_tell_everything() -> None:
    assert "Connector" not in shown(state(worker("prefill-0", kind="embedded")))


def test_status_names_the_pairs_in_which_something_is_wrong() -> None:
    pair = {"prefill": "p0", "decode": "d0"}
    troubled = [pair | {"state": "aside", "why": "garbage"}]
    slow = [pair | {"gb_s": 0.3}]
    text = shown(
        state(
            pairs={"proved": 3, "unproved": 1, "aside": 1, "troubled": troubled, "slow": slow},
            incompatible=[pair | {"why": "block size: p0 has 32, d0 has 16"}] * 20,
        )
    )
    assert "3 proved, 1 not yet, 1 aside" in text
    assert "p0 > d0 is aside: garbage" in text
    assert "p0 > d0 is slow: 0.3 GB/s" in text
    assert "p0 > d0 cannot be: block size: p0 has 32, d0 has 16" in text
    assert "and 12 more" in text
    assert "Pairs" not in shown(state(pairs={"proved": 1, "troubled": [], "slow": []}, incompatible=[]))


def test_status_begins_with_whether_the_service_is_well_and_what_to_do() -> None:
    findings = [{"words": "d1 is not up (gone)", "do": "start it"}, {"words": "d2 drains", "do": None}]
    text = shown(state(worker("prefill-0"), health={"tone": "warn", "words": "It works: d1 is not up", "findings": findings}))
    first, second, third, *_ = text.splitlines()
    assert (first, second.strip(), third.strip()) == ("It works: d1 is not up.", "What to do: start it", "d2 drains")


def test_status_says_what_people_gave_by_hand() -> None:
    changes = [
        {"age_s": 70.0, "why": "manual", "words": "p0 moved to decode, because a person asked for it"},
        {"age_s": 3.0, "why": "decode_short", "words": "p1 moved to decode, because answers are many"},
    ]
    text = shown(state(worker("prefill-0", held=True, busy_ratio=0.42), role_changes=changes))
    assert "prefill (by hand)" in text
    assert "42%" in text
    assert "1 min ago: p0 moved to decode, because a person asked for it" in text
    assert "p1 moved" not in text, "what balance did stands with balance"


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({}, ""),
        ({"ttft_s": None, "predicted_ttft_s": 0.25}, "expected after 0.25 s"),
        ({"ttft_s": 0.314}, "after 0.31 s"),
        ({"ttft_s": 0.314, "predicted_ttft_s": 0.25}, "after 0.31 s, expected 0.25 s"),
    ],
)
def test_status_says_when_the_first_token_came_and_was_expected(known: dict[str, Any], told: str) -> None:
    decision = {"age_s": 2.0, "choice": "colocated", "why": "no_pair", "prefill": None, "decode": "d0", "words": "d0 does all"}
    (line,) = [
        line for line in shown(state(worker("decode-0"), decisions=[decision | known])).splitlines() if "d0 does" in line
    ]
    assert line.partition("d0 does all")[2].strip() == told
