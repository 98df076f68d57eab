"""The sentence on top: whether the service is well, and what to do where it is not."""

from typing import Any

import pytest

from twinpool.core.decisions import Choice, Decision, Why
from twinpool.gateway.decision_words import words
from twinpool.gateway.health import judge_health

TTFT = "TTFT of 30 long requests: mean 2.10 s, over the limit of 1.3 s"
LIMITS = {"ttft_long_s": 1.3}
PEAK = "use at the peak 41%, under the floor of 85%"


def worker(name: str, **other: Any) -> dict[str, Any]:
    role = {"p": "prefill", "d": "decode", "c": "colocated"}[name[0]]
    return {"id": name, "role": role, "state": "ready", "reason": None, "warning": None, "obstacle": None} | other


def state(*workers: dict[str, Any], **other: Any) -> dict[str, Any]:
    """A service that is well, but for `other`."""
    return {
        "gateway": {"draining": False},
        "workers": list(workers) or [worker("p0"), worker("d0")],
        "pairs": {"proved": 1, "troubled": [], "slow": []},
        "incompatible": [],
        "balance": None,
        "indicators": {"verdict": "pass", "verdicts": ["pass", "pass"], "reasons": ["fast", "busy"], "limits": LIMITS},
        "ttft_lately": {"short": {"requests": 50, "mean_s": 2.5}, "long": {"requests": 0, "mean_s": None}},
        "ended_lately": {"ok": 100},
        "requests": {"live": 0, "waiting": 0},
    } | other


def judged(verdicts: list[str]) -> dict[str, Any]:
    verdict = "fail" if "fail" in verdicts else "pass" if set(verdicts) == {"pass"} else "unknown"
    return {"verdict": verdict, "verdicts": verdicts, "reasons": [TTFT, PEAK], "limits": LIMITS}


def test_a_service_that_is_well_has_one_short_sentence() -> None:
    assert judge_health(state()) == {"tone": "good", "words": "The service is well", "findings": []}


def test_what_cannot_be_told_yet_is_said() -> None:
    found = judge_health(state(indicators=judged(["unknown", "unknown"])))
    assert (found["tone"], found["findings"]) == ("good", [])
    assert "too little traffic so far" in found["words"]


PAIR = {"prefill": "p0", "decode": "d0"}
THREE = [worker("p0"), worker("d0"), worker("d1")]
WRONG: list[tuple[dict[str, Any], str, str, str]] = [
    ({"workers": []}, "bad", "no worker is up", "attach a worker"),
    ({"workers": [worker("p0", state="lost", reason="no route")]}, "bad", "no worker is up", "p0: no route"),
    ({"ended_lately": {"ok": 90, "failed": 10}}, "bad", "10 of 100 requests of the last five minutes failed", "log"),
    (
        {"ended_lately": {"ok": 80, "refused": 20}},
        "bad",
        "20 of 100 requests of the last five minutes were refused",
        "--balance",
    ),
    ({"indicators": judged(["fail", "pass"])}, "bad", TTFT, "--balance auto"),
    ({"indicators": judged(["pass", "fail"]), "workers": THREE}, "warn", PEAK, "fewer workers"),
    (
        {"ttft_lately": {"short": {"requests": 6, "mean_s": 33.2}, "long": {"requests": 0, "mean_s": None}}},
        "bad",
        "TTFT of 6 short requests of the last five minutes: mean 33.20 s, far over --slo-ttft (1.3 s)",
        "add workers",
    ),
    (
        {"ttft_lately": {"short": {"requests": 0, "mean_s": None}, "long": {"requests": 5, "mean_s": 2.7}}},
        "bad",
        "TTFT of 5 long requests",
        "add workers",
    ),
    ({"gateway": {"draining": True}}, "warn", "the gateway is ending", "start it again"),
    ({"requests": {"live": 9, "waiting": 5}}, "warn", "5 requests wait for a worker", "add workers"),
    (
        {"workers": [worker("p0"), worker("d0"), worker("d1", state="lost", reason="gone")]},
        "warn",
        "d1 is not up (gone)",
        "serve",
    ),
    ({"workers": [worker("p0"), worker("d0"), worker("d1", state="draining")]}, "warn", "d1 drains", "remove it"),
    (
        {"pairs": {"proved": 0, "troubled": [PAIR | {"state": "aside", "why": "garbage"}], "slow": []}},
        "warn",
        "no handoff",
        "garbage",
    ),
    (
        {"pairs": {"proved": 0, "troubled": [], "slow": []}, "incompatible": [PAIR | {"why": "dtype"}]},
        "warn",
        "no handoff",
        "dtype",
    ),
    (
        {"pairs": {"proved": 1, "troubled": [PAIR | {"state": "aside", "why": "garbage"}], "slow": []}},
        "warn",
        "go wrong",
        "garbage",
    ),
    ({"pairs": {"proved": 1, "troubled": [], "slow": [PAIR | {"gb_s": 0.3}]}}, "warn", "are slow, at 0.3 GB/s", "TCP"),
    ({"balance": {"mode": "auto", "why": "hopeless", "words": "nothing"}}, "warn", "--slo-itl", "a faster engine"),
]


@pytest.mark.parametrize(("wrong", "tone", "says", "do"), WRONG)
def test_each_thing_that_is_wrong_is_said_with_what_to_do(wrong: dict[str, Any], tone: str, says: str, do: str) -> None:
    found = judge_health(state() | wrong)
    assert found["tone"] == tone
    assert says in found["words"]
    assert found["findings"][0]["words"] in found["words"]
    assert do in found["findings"][0]["do"]


@pytest.mark.parametrize(
    "fine",
    [
        {"ended_lately": {"ok": 100, "failed": 2, "client_left": 50}},
        {"ended_lately": {}},
        {"requests": {"live": 9, "waiting": 4}},
        {
            "pairs": {
                "proved": 3,
                "troubled": [PAIR | {"state": "unproved", "why": "its canary has not set out yet"}],
                "slow": [],
            }
        },
        {"workers": [worker("c0"), worker("c1")], "pairs": {"proved": 0, "troubled": [], "slow": []}},
        {"balance": {"mode": "auto", "why": "good", "words": "nothing"}},
        {"ttft_lately": {"short": {"requests": 4, "mean_s": 33.2}, "long": {"requests": 9, "mean_s": 2.6}}},
    ],
)
def test_what_is_no_reason_to_worry_is_none(fine: dict[str, Any]) -> None:
    assert judge_health(state() | fine)["tone"] == "good"


def test_the_worst_comes_first() -> None:
    found = judge_health(state(indicators=judged(["fail", "fail"]), requests={"live": 9, "waiting": 9}))
    assert [finding["tone"] for finding in found["findings"]] == ["bad", "warn", "warn"]
    assert found["words"] == f"The service is not well: {TTFT}"


def test_what_is_late_by_the_indicator_is_said_once() -> None:
    lately = {"short": {"requests": 0, "mean_s": None}, "long": {"requests": 30, "mean_s": 9.0}}
    assert len(judge_health(state(indicators=judged(["fail", "pass"]), ttft_lately=lately))["findings"]) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"workers": [worker("p0"), worker("d0")]},
        {"workers": [*THREE[:2], worker("d1", state="lost", reason="gone")]},
        {"requests": {"live": 9, "waiting": 1}},
        {"ended_lately": {"ok": 100, "refused": 1}},
        {"indicators": judged(["fail", "fail"])},
        {"ttft_lately": {"short": {"requests": 6, "mean_s": 33.2}, "long": {"requests": 0, "mean_s": None}}},
    ],
)
def test_fewer_workers_are_no_advice_to_a_crowd_nor_under_one_pair(other: dict[str, Any]) -> None:
    found = judge_health(state(*THREE, indicators=judged(["pass", "fail"])) | other)
    assert next(finding["do"] for finding in found["findings"] if finding["words"] == PEAK) is None


@pytest.mark.parametrize(
    ("balance", "said"),
    [
        ({"words": "nothing yet, because costs are not known"}, "add workers; balance says: nothing yet, because costs"),
        ({"why": "settling", "words": "nothing, because another"}, "add workers; balance says: nothing, because another"),
        ({"why": "good", "words": "nothing"}, "add workers: the pools are balanced already"),
    ],
)
def test_pools_are_called_balanced_only_where_balance_found_them_so(balance: dict[str, Any], said: str) -> None:
    found = judge_health(state(balance={"mode": "auto"} | balance, requests={"live": 9, "waiting": 9}))
    assert found["findings"][0]["do"].startswith(said)


@pytest.mark.parametrize("why", Why)
def test_every_reason_of_a_decision_has_words(why: Why) -> None:
    assert "_" not in words(Decision(Choice.WAIT, why)).removeprefix("waits: ")


def test_a_decision_says_who_does_what() -> None:
    assert words(Decision(Choice.DISAGGREGATED, Why.PAIR_READY, "p0", "d1")) == "p0 reads, d1 writes: both have room"
    assert words(Decision(Choice.COLOCATED, Why.NO_PAIR, decode="d1")).startswith("d1 does all of it: ")
    assert words(Decision(Choice.REFUSE, Why.QUEUE_FULL)) == "refused: the queue is full"
