"""Load is counted where the choice is made, in the unit that says something, and given back once."""

import heapq
from collections import Counter

import pytest
from tests.core.stage import Stage, prompt, worker

from twinpool.core.cluster import Cluster, LegKey
from twinpool.core.commands import SendDecode, SendPrefill, SendWhole
from twinpool.core.model import Dialect, Failure, Leg


def workers_used(stage: Stage, kind: type) -> Counter[str]:
    return Counter(command.worker for commands in stage.commands for command in commands if isinstance(command, kind))


def spread(counts: Counter[str], names: list[str]) -> int:
    return max(counts[name] for name in names) - min(counts[name] for name in names)


@pytest.mark.parametrize("names", [["c1", "c2", "c3", "c4"], ["p1", "p2", "p3", "p4"]])
def test_forty_at_once_spread_evenly(names: list[str]) -> None:
    """LB-05: nothing has answered yet, and still each worker gets ten."""
    decodes = [worker("d1", slots=64)] if names[0] == "p1" else []
    stage = Stage(*(worker(name, slots=64) for name in names), *decodes)
    for n in range(40):
        assert len(stage.arrives(f"r{n}")) == 1
    assert spread(workers_used(stage, SendPrefill if decodes else SendWhole), names) == 0


@pytest.mark.parametrize("dialect", list(Dialect))
def test_a_decode_worker_counts_from_the_choice_on(dialect: Dialect) -> None:
    """LB-08: fifty at once, and no decode leg is out before its prefill has ended."""
    names = ["d1", "d2", "d3", "d4"]
    stage = Stage(worker("p1", slots=None, dialect=dialect), *(worker(n, slots=64, dialect=dialect) for n in names))
    for n in range(50):
        stage.arrives(f"r{n}", prompt(10))
    assert {stage.load(name)[2] for name in names} == {12, 13}
    for n in range(50):
        stage.prefilled(f"r{n}")
    assert spread(workers_used(stage, SendDecode), names) == 1


def test_prefill_is_balanced_by_tokens_not_by_requests() -> None:
    """LB-09: two hundred prompts of 100 and 20,000 tokens; each worker reads a fair share of the tokens."""
    names = ["p1", "p2", "p3", "p4"]
    stage = Stage(*(worker(name) for name in names), worker("d1", slots=512))
    lengths = {f"r{n}": 100 if n % 2 else 20_000 for n in range(200)}
    given: Counter[str] = Counter()
    busy_until: Counter[str] = Counter()
    ends: list[tuple[int, str]] = []

    def play(commands: list[object], now: int) -> None:
        for command in commands:
            if isinstance(command, SendPrefill):
                tokens = lengths[command.request]
                given[command.worker] += tokens
                busy_until[command.worker] = max(now, busy_until[command.worker]) + tokens
                heapq.heappush(ends, (busy_until[command.worker], command.request))

    for name, tokens in lengths.items():
        play(stage.arrives(name, prompt(tokens)), 0)
    while ends:
        now, name = heapq.heappop(ends)
        play(stage.prefilled(name, tokens=lengths[name]), now)
    assert sum(given.values()) == sum(lengths.values())
    assert max(given.values()) / min(given[name] for name in names) < 1.3


def test_decode_is_balanced_by_sequences_then_by_kv() -> None:
    stage = Stage(worker("p1", slots=64), worker("d1"), worker("d2"))
    stage.arrives("long", prompt(1000))
    stage.arrives("short", prompt(10))
    assert (stage.load("d1"), stage.load("d2")) == ((0, 1000, 1), (0, 10, 1))
    stage.arrives("next", prompt(10))
    assert stage.load("d2") == (0, 20, 2)


@pytest.mark.parametrize("retry", [Failure.BUSY, Failure.ERROR])
def test_a_retry_counts_once(retry: Failure) -> None:
    """LB-02: neither twice on one worker, nor given back twice."""
    stage = Stage(worker("c1"), worker("c2"))
    stage.arrives("r")
    stage.fails("r", Leg.WHOLE, retry)
    assert (stage.load("c1"), stage.load("c2")) == ((0, 0, 0), (100, 100, 1))
    stage.fails("r", Leg.WHOLE, retry, attempt=1)
    stage.finishes("r", attempt=1)
    assert stage.load("c2") == (100, 100, 1)
    stage.finishes("r")
    assert stage.is_empty()


def test_who_joined_first_does_not_decide_a_tie() -> None:
    early, late = Stage(worker("c1"), worker("c2")), Stage(worker("c2"), worker("c1"))
    assert early.arrives("r") == late.arrives("r") == [SendWhole(request="r", attempt=1, worker="c1")]


# The books themselves


KEY = LegKey("r", 1, Leg.WHOLE)


def cluster() -> Cluster:
    made = Cluster()
    made.join(worker("c1"))
    made.take(KEY, made["c1"], prefill_tokens=7, kv_tokens=9, sequences=2)
    return made


def test_a_leg_is_counted_once() -> None:
    books = cluster()
    with pytest.raises(KeyError):
        books.take(KEY, books["c1"])
    books.validate({"r"})


def test_a_leg_is_given_back_once() -> None:
    books = cluster()
    books.give_back(KEY)
    with pytest.raises(KeyError):
        books.give_back(KEY)
    assert not books.holds(KEY)
    assert (books["c1"].prefill_tokens, books["c1"].kv_tokens, books["c1"].sequences) == (0, 0, 0)


def test_a_prompt_that_was_read_twice_was_read_once() -> None:
    books = cluster()
    books.prompt_read(KEY, 100, 0)
    books.prompt_read(KEY, 100, 0)
    assert books["c1"].prefill_tokens == 0
    books.validate({"r"})


@pytest.mark.parametrize("name", ["prefill_tokens", "kv_tokens", "sequences"])
def test_the_audit_finds_a_sum_that_is_wrong(name: str) -> None:
    books = cluster()
    setattr(books["c1"], name, 100)
    with pytest.raises(AssertionError, match=f"c1: {name} 100"):
        books.validate({"r"})


def test_the_audit_finds_a_leg_of_a_request_that_has_ended() -> None:
    with pytest.raises(AssertionError, match="its request has ended"):
        cluster().validate(())


def test_the_load_of_a_removed_worker_is_given_back_all_the_same() -> None:
    books = cluster()
    books.remove("c1")
    books.give_back(KEY)
    books.validate(())
