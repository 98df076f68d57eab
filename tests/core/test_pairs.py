"""Pairs of workers: which are proved, which are set aside, what goes over neither, and when a canary flies.

A canary is told of by its number; `p1>d1` is the pair in which p1 prefills and d1 decodes.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from tests.core.stage import Stage, prompt, stock, worker

from twinpool.config import Routing
from twinpool.core.commands import (
    CancelLeg,
    Command,
    FailRequest,
    ProbeWorker,
    ProveHandoff,
    ReleaseHandle,
    SendDecode,
    SendPrefill,
    SendWhole,
)
from twinpool.core.decisions import Choice, Why
from twinpool.core.lifecycle import HandleState, PairState
from twinpool.core.model import Dialect, Failure, Leg, Role, Usage
from twinpool.errors import Reason

P, D = (Role.PREFILL,), (Role.DECODE,)
STRIKES = [Failure.ERROR, Failure.TIMED_OUT, Failure.HANDLE_REFUSED, Failure.SUSPECT]
"""Ends of a decode leg for which the pair may be at fault."""


def fixed(name: str, **facts: Any) -> Any:
    """A stock worker that takes only the role of its name: no pair backwards."""
    return stock(name, allowed_roles=P if name[0] == "p" else D, **facts)


def flown(commands: Iterable[Command]) -> list[tuple[int, str]]:
    """The canaries among the commands: number and pair."""
    return [(c.canary, f"{c.prefill}>{c.decode}") for c in commands if isinstance(c, ProveHandoff)]


def unproved(*names: str, rules: Routing | None = None) -> Stage:
    return Stage(*(fixed(name) for name in names or ("p1", "d1")), rules=rules)


def proved(*names: str, rules: Routing | None = None) -> Stage:
    """Every pair proved, and nothing else has happened; a moment has gone by since the last canary."""
    stage = unproved(*names, rules=rules)
    while under_way := [pair for pair in stage.controller.pairs() if pair.canary]:
        for pair in under_way:
            stage.proves(pair.canary, took_s=0.01)
        stage.waits(1)
    assert set(stage.pairs().values()) == {"proved"}
    return stage


def hands_over(stage: Stage, request: str, failure: Failure | None = None) -> tuple[str, str]:
    """One request takes the way of a pair up to its end, good or bad; says which pair. One that failed leaves at once."""
    sent = next(c for c in stage.arrives(request) if isinstance(c, SendPrefill))
    decode = next(c for c in stage.prefilled(request) if isinstance(c, SendDecode))
    if failure is None:
        stage.finishes(request)
    else:
        stage.fails(request, Leg.DECODE, failure)
        stage.leaves(request)
        if stage.handles:
            stage.released(request, attempt=1, freed=True)
    return sent.worker, decode.worker


# Not proved


def test_nothing_of_a_client_goes_over_a_pair_that_is_not_proved_and_the_decision_says_so() -> None:
    stage = unproved("p1", "d1")
    assert stage.pairs() == {"p1>d1": "unproved"}
    assert stage.arrives("r") == [SendWhole(request="r", attempt=1, worker="d1")]
    assert (stage.decisions[-1].choice, stage.decisions[-1].why) == (Choice.COLOCATED, Why.PAIR_UNPROVED)


def test_the_first_canary_flies_when_the_second_worker_joins() -> None:
    stage = Stage()
    assert stage.joins(fixed("p1")) == []
    assert stage.joins(fixed("d1")) == [ProveHandoff(canary=1, prefill="p1", decode="d1")]


def test_requests_go_over_the_pair_as_soon_as_its_canary_has_arrived() -> None:
    stage = unproved()
    stage.proves(1)
    assert stage.arrives("r") == [SendPrefill(request="r", attempt=1, worker="p1")]
    assert stage.decisions[-1].why is Why.PAIR_READY


def test_who_waits_because_no_pair_is_proved_goes_when_one_is() -> None:
    stage = Stage(*(fixed(name, serves_whole=False) for name in ("p1", "d1")))
    assert stage.arrives("r") == []
    assert stage.decisions[-1].why is Why.PAIR_UNPROVED
    assert SendPrefill(request="r", attempt=1, worker="p1") in stage.proves(1)


def test_only_the_proved_one_of_two_is_used() -> None:
    stage = unproved("p1", "d1", "d2")
    assert flown(stage.proves(1)) == [(2, "p1>d2")]
    assert stage.pairs() == {"p1>d1": "proved", "p1>d2": "unproved"}
    for n in range(5):
        stage.arrives(f"r{n}")
    assert {decision.decode for decision in stage.decisions} == {"d1"}


def test_a_request_that_no_pair_could_serve_says_so_in_other_words() -> None:
    stage = Stage(fixed("p1"), fixed("d1", dialect=None))
    assert stage.pairs() == {}
    stage.arrives("r")
    assert stage.decisions[-1].why is Why.NO_PAIR


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"gives_handoffs": False}, {}),
        ({}, {"reads_handoffs": False}),
        ({"fingerprint": (("version", "0.31"),)}, {"fingerprint": (("version", "0.32"),)}),
        ({"tensor_parallel": 2}, {"tensor_parallel": 1}),
        ({"dialect": Dialect.SGLANG}, {}),
    ],
)
def test_two_that_cannot_hand_over_are_no_pair_and_no_canary_flies(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    stage = Stage(fixed("p1", **prefill), fixed("d1", **decode))
    assert stage.pairs() == {}
    assert stage.waits(600) == []


def test_engines_that_verify_their_handles_are_a_pair_at_once_and_need_no_canary() -> None:
    stage = Stage(worker("p1"), worker("d1"))
    assert set(stage.pairs().values()) == {"proved"}
    stage.arrives("r")
    assert stage.decisions[-1].why is Why.PAIR_READY
    stage.prefilled("r")
    stage.finishes("r")
    assert flown(stage.waits(3600)) == []


@pytest.mark.parametrize("joins", [(worker("p1"), stock("d1")), (stock("p1"), worker("d1"))])
def test_one_that_verifies_does_not_vouch_for_one_that_does_not(joins: Any) -> None:
    stage = Stage(*joins)
    assert stage.pair("p1", "d1").state is PairState.UNPROVED


# Which canary, and when


def test_a_worker_has_one_canary_at_a_time() -> None:
    stage = unproved("p1", "d1", "d2", "d3")
    assert [c for commands in stage.commands for _, c in flown(commands)] == ["p1>d1"]
    assert stage.waits(600) == [], "however long it takes"
    assert flown(stage.proves(1)) == [(2, "p1>d2")]


def test_pairs_that_share_no_worker_are_proved_side_by_side() -> None:
    stage = Stage(fixed("p1"), fixed("p2"), fixed("d1"))
    assert flown(stage.joins(fixed("d2"))) == [(2, "p2>d2")]


@pytest.mark.parametrize("joins", [("d1", "d2", "p1", "p2"), ("p1", "d1", "p2", "d2"), ("p2", "p1", "d2", "d1")])
def test_pairs_of_the_workers_own_roles_come_first_however_they_joined(joins: tuple[str, ...]) -> None:
    """A first handshake may take minutes: none that no request would use now goes before one that requests wait for."""
    stage = Stage()
    flights = []
    for name in joins:
        flights += flown(stage.joins(stock(name)))
        stage.waits(0.1)
    assert {pair for _, pair in flights} in ({"p1>d1", "p2>d2"}, {"p1>d2", "p2>d1"})
    stage.waits(60)
    flights += [*flown(stage.proves(1, took_s=60)), *flown(stage.proves(2, took_s=60))]
    own = {"p1>d1", "p1>d2", "p2>d1", "p2>d2"}
    assert {pair for _, pair in flights} == own
    for number in (3, 4):
        stage.proves(number, took_s=1)
    assert {pair for pair, state in stage.pairs().items() if state == "proved"} == own
    later = flown(stage.waits(7000))
    assert later
    assert not {pair for _, pair in later} & own


def test_a_worker_is_kept_for_the_pair_that_requests_wait_for() -> None:
    """p2 could prove itself with p1 while d1 is taken; but then d1 would have to wait for it."""
    stage = Stage(stock("p1"), stock("d1"), stock("p2"))
    assert flown(stage.waits(30)) == []
    assert flown(stage.proves(1, took_s=0.1)) == [(2, "p2>d1")]


def test_the_worker_with_the_fewest_partners_comes_first() -> None:
    stage = proved("p1", "d1", "d2", "d3", "d4")
    stage.joins(fixed("p2"))
    ((_, first),) = flown(stage.commands[-1])
    assert first.startswith("p2>")
    stage.joins(fixed("p3"))
    flights = [first, *(pair for _, pair in flown(stage.commands[-1]))]
    assert Counter(pair[:2] for pair in flights) == {"p2": 1, "p3": 1}


def test_two_partners_each_are_proved_without_a_rest_and_the_others_within_their_share() -> None:
    """A hundredth of a worker's time, from its third partner on."""
    stage = unproved("p1", "d1", "d2", "d3", "d4")
    assert flown(stage.proves(1, took_s=2.0)) == [(2, "p1>d2")]
    rest = flown(stage.proves(2, took_s=2.0))
    assert rest == [(3, "p1>d3")], "d3 has no partner at all"
    assert flown(stage.proves(3, took_s=2.0)) == [(4, "p1>d4")]
    assert flown(stage.proves(4, took_s=2.0)) == []
    assert flown(stage.waits(197)) == []
    assert len(flown(stage.waits(2))) == 1, "the first that is due again"


def times_of_canaries(stage: Stage, *, seconds: float, took_s: float) -> Counter[str]:
    """Let that much time pass, in which every canary arrives after `took_s`: each worker's seconds of canaries."""
    spent: Counter[str] = Counter()
    coming: list[tuple[float, int]] = []

    def note(commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, ProveHandoff):
                coming.append((stage.at + took_s, command.canary))
                spent.update({command.prefill: 1, command.decode: 1})

    end = stage.at + seconds
    note(c for commands in stage.commands for c in commands)
    while stage.at < end:
        coming.sort()
        due = stage.controller.next_wakeup()
        until = min(end, *(at for at, _ in coming[:1]), *([due] if due is not None else []))
        note(stage.waits(max(0.0, until - stage.at)))
        while coming and coming[0][0] <= stage.at:
            note(stage.proves(coming.pop(0)[1], took_s=took_s))
    return spent


def test_sixty_four_workers_are_proved_within_the_share_and_with_hardly_more_wakeups_than_canaries() -> None:
    """4,032 pairs, of which 1,024 are of the workers' own roles. None of it costs more than a hundredth of any worker's time
    but for the first two partners."""
    stage = Stage(*(stock(f"{'p' if n % 2 else 'd'}{n:02}") for n in range(64)))
    assert len(stage.pairs()) == 64 * 63
    seconds, took_s = 120.0, 0.1
    spent = times_of_canaries(stage, seconds=seconds, took_s=took_s)
    assert max(spent.values()) * took_s <= 0.01 * seconds + 6 * took_s
    own = {pair: state for pair, state in stage.pairs().items() if (pair[0], pair[4]) == ("p", "d")}
    partners = Counter(pair[:3] for pair, state in own.items() if state == "proved")
    assert set(partners) == {f"p{n:02}" for n in range(1, 64, 2)}
    assert min(partners.values()) >= 2
    sources = Counter(pair[4:] for pair, state in own.items() if state == "proved")
    assert min(sources.values()) >= 2
    canaries = sum(isinstance(c, ProveHandoff) for commands in stage.commands for c in commands)
    assert canaries == sum(spent.values()) / 2
    assert len(stage.events) <= 64 + 2 * canaries


def test_looks_at_some_pairs_do_not_keep_others_from_being_proved() -> None:
    """Each worker has time for six canaries a minute, and more partners than that."""
    stage = Stage(*(stock(f"{'p' if n % 2 else 'd'}{n:02}") for n in range(20)))
    times_of_canaries(stage, seconds=700.0, took_s=0.1)
    assert set(stage.pairs().values()) == {"proved"}


def test_the_share_is_the_operators() -> None:
    spent = []
    for share in (0.01, 0.1):
        stage = unproved("p1", "d1", rules=Routing(canary_share=share))
        spent.append(times_of_canaries(stage, seconds=2000, took_s=1.0)["p1"])
    assert spent[0] == pytest.approx(2000 * 0.01, abs=2)
    assert spent[1] > spent[0]


def test_a_pair_at_rest_is_looked_at_again_now_and_then() -> None:
    stage = unproved()
    stage.proves(1, took_s=0.01)
    assert flown(stage.waits(59)) == []
    assert flown(stage.waits(2)) == [(2, "p1>d1")]


def test_a_pair_in_use_is_looked_at_more_often() -> None:
    stage = unproved()
    stage.proves(1, took_s=0.01)
    stage.waits(1)
    hands_over(stage, "r")
    assert flown(stage.waits(5)) == [(2, "p1>d1")], "a look every few seconds"


def test_a_pair_in_use_is_not_looked_at_more_often_than_its_share_allows() -> None:
    stage = unproved()
    stage.proves(1, took_s=0.2)
    hands_over(stage, "r")
    assert flown(stage.waits(19.7)) == []
    assert flown(stage.waits(0.2)) == [(2, "p1>d1")]


def test_use_before_the_last_canary_is_no_use_since() -> None:
    stage = unproved()
    stage.proves(1, took_s=0.01)
    hands_over(stage, "r")
    stage.waits(6)
    stage.proves(2, took_s=0.01)
    assert flown(stage.waits(59)) == []
    assert flown(stage.waits(2)) == [(3, "p1>d1")]


# Set aside


@pytest.mark.parametrize("failure", STRIKES)
def test_three_requests_in_a_row_set_the_pair_aside_and_not_its_workers(failure: Failure) -> None:
    stage = proved("p1", "d1")
    for n in range(3):
        assert hands_over(stage, f"r{n}", failure) == ("p1", "d1")
    assert stage.pairs() == {"p1>d1": "aside"}
    assert [stage.arrives(f"s{n}") for n in range(2)] == [
        [SendWhole(request=f"s{n}", attempt=1, worker="d1")] for n in range(2)
    ]
    assert stage.decisions[-1].why is Why.PAIR_ASIDE
    assert stage.pair("p1", "d1").trouble


def test_the_other_pairs_of_both_workers_go_on() -> None:
    stage = proved("p1", "p2", "d1", "d2")
    bad = hands_over(stage, "r0", Failure.ERROR)
    for n in range(1, 3):
        assert hands_over(stage, f"r{n}", Failure.ERROR) == bad
    states = stage.pairs()
    assert Counter(states.values()) == {"aside": 1, "proved": 3}
    assert states[f"{bad[0]}>{bad[1]}"] == "aside"
    assert stage.pair(*bad).state is PairState.ASIDE
    ways = {hands_over(stage, f"s{n}") for n in range(4)}
    assert ways
    assert bad not in ways
    assert all(decision.choice is Choice.DISAGGREGATED for decision in stage.decisions)


@pytest.mark.parametrize("failure", sorted(set(Failure) - {*STRIKES, Failure.MISCOUNTED}))
def test_what_cannot_be_the_pairs_fault_is_no_strike(failure: Failure) -> None:
    """A busy or a lost worker, the client's own mistake, a prefill without a handle."""
    stage = proved("p1", "d1")
    leg = Leg.PREFILL if failure is Failure.NO_HANDLE else Leg.DECODE
    for n in range(5):
        stage.arrives(f"r{n}")
        if leg is Leg.DECODE:
            stage.prefilled(f"r{n}")
        stage.fails(f"r{n}", leg, failure)
        stage.leaves(f"r{n}")
        stage.waits(40)
        for name in ("p1", "d1"):
            stage.returns(name)
    assert stage.pairs() == {"p1>d1": "proved"}
    assert stage.pair("p1", "d1").strikes == 0


def test_a_success_in_between_clears_the_strikes() -> None:
    stage = proved("p1", "d1")
    for n in range(6):
        hands_over(stage, f"bad{n}", Failure.ERROR)
        if n % 2:
            hands_over(stage, f"good{n}")
    assert stage.pairs() == {"p1>d1": "proved"}


def test_the_first_token_is_success_enough() -> None:
    stage = proved("p1", "d1")
    for n in range(2):
        hands_over(stage, f"bad{n}", Failure.ERROR)
    stage.arrives("long")
    stage.prefilled("long")
    stage.first_token("long")
    hands_over(stage, "bad2", Failure.ERROR)
    assert stage.pairs() == {"p1>d1": "proved"}


def test_a_failure_in_mid_stream_is_no_strike() -> None:
    """The handoff had gone well."""
    stage = proved("p1", "d1")
    for n in range(4):
        stage.arrives(f"r{n}")
        stage.prefilled(f"r{n}")
        stage.first_token(f"r{n}")
    for n in range(4):
        stage.fails(f"r{n}", Leg.DECODE, Failure.ERROR)
    assert stage.pairs() == {"p1>d1": "proved"}
    assert stage.pair("p1", "d1").strikes == 0


def test_a_request_that_breaks_every_engine_strikes_once() -> None:
    stage = proved("p1", "d1")
    stage.arrives("poison")
    for _ in range(2):
        stage.prefilled("poison")
        stage.fails("poison", Leg.DECODE, Failure.ERROR, status=500)
    assert stage.pair("p1", "d1").strikes == 1


def test_two_such_requests_that_take_turns_strike_twice() -> None:
    stage = proved("p1", "d1")
    for request in ("one", "two"):
        stage.arrives(request)
    for request in ("one", "two", "one", "two"):
        stage.prefilled(request)
        stage.fails(request, Leg.DECODE, Failure.ERROR, status=500)
    assert stage.pair("p1", "d1").strikes == 2
    assert stage.pairs() == {"p1>d1": "proved"}


def test_a_canary_that_fails_sets_aside_at_once() -> None:
    stage = proved("p1", "d1")
    stage.waits(60)
    under_way = stage.pair("p1", "d1").canary
    assert under_way
    stage.fails_canary(under_way, why="it wrote something else")
    assert stage.pairs() == {"p1>d1": "aside"}
    assert stage.pair("p1", "d1").trouble == "it wrote something else"


def test_a_canary_that_never_set_out_says_nothing_of_the_pair() -> None:
    stage = proved("p1", "d1")
    stage.waits(60)
    stage.fails_canary(stage.pair("p1", "d1").canary, why="d1 is busy", was_tried=False, took_s=0.0)
    assert stage.pairs() == {"p1>d1": "proved"}
    assert len(flown(stage.waits(1.1))) == 1, "and another one flies soon"


def test_a_pair_comes_back_by_its_canary_and_is_clean_again() -> None:
    stage = proved("p1", "d1")
    for n in range(3):
        hands_over(stage, f"r{n}", Failure.ERROR)
    (flight,) = flown(stage.waits(1.1))
    stage.proves(flight[0])
    assert stage.pairs() == {"p1>d1": "proved"}
    assert (stage.pair("p1", "d1").strikes, stage.pair("p1", "d1").trouble) == (0, "")
    for n in range(2):
        hands_over(stage, f"s{n}", Failure.ERROR)
    assert stage.pairs() == {"p1>d1": "proved"}, "the strikes of before do not count"


def test_a_vouching_pair_comes_back_by_a_canary_too() -> None:
    stage = Stage(worker("p1", allowed_roles=P), worker("d1", allowed_roles=D))
    for n in range(3):
        hands_over(stage, f"r{n}", Failure.ERROR)
    assert stage.pairs() == {"p1>d1": "aside"}
    (flight,) = flown(stage.waits(1.1))
    stage.proves(flight[0])
    assert stage.pairs() == {"p1>d1": "proved"}
    assert flown(stage.waits(3600)) == []


def test_the_wait_for_the_next_canary_doubles_up_to_a_minute() -> None:
    stage = unproved()
    number, waits_s = 1, []
    for _ in range(10):
        stage.fails_canary(number, took_s=0.01)
        failed = stage.at
        while not (flights := flown(stage.waits(0.5))):
            assert stage.at - failed < 100
        ((number, _),) = flights
        waits_s.append(stage.at - failed)
    assert waits_s[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert set(waits_s[7:]) == {64}


def test_a_pair_that_stood_well_for_a_while_begins_at_the_shortest_wait_again() -> None:
    stage = unproved()
    stage.fails_canary(1)
    for _ in range(3):
        ((number, _),) = flown(stage.waits(70))
        stage.fails_canary(number, took_s=0.01)
    ((number, _),) = flown(stage.waits(70))
    stage.proves(number, took_s=0.01)
    stage.waits(61)
    stage.fails_canary(stage.pair("p1", "d1").canary, took_s=0.01)
    assert len(flown(stage.waits(1.1))) == 1


def test_a_pair_that_comes_back_and_fails_at_once_waits_longer_each_time() -> None:
    """A flapping fabric must not cost three requests a second."""
    stage = unproved()
    stage.proves(1, took_s=0.01)
    waits_s = []
    for trial in range(4):
        for n in range(3):
            hands_over(stage, f"r{trial}.{n}", Failure.ERROR)
        aside = stage.at
        while not (flights := flown(stage.waits(0.5))):
            assert stage.at - aside < 100
        waits_s.append(stage.at - aside)
        stage.proves(flights[0][0], took_s=0.01)
    assert waits_s == [1, 2, 4, 8]


# Condemned: they count the same prompt differently


def miscounts(stage: Stage, request: str = "r") -> None:
    stage.arrives(request)
    stage.prefilled(request, tokens=10)
    stage.fails(request, Leg.DECODE, Failure.MISCOUNTED)


def test_two_that_count_a_prompt_differently_are_set_aside_at_the_first_sign() -> None:
    stage = proved("p1", "d1")
    miscounts(stage)
    assert stage.pairs() == {"p1>d1": "aside"}
    assert "count" in stage.pair("p1", "d1").trouble
    assert SendWhole(request="r", attempt=2, worker="d1") in stage.commands[-1]


def test_a_stream_that_tells_its_count_at_the_end_condemns_the_pair_too() -> None:
    stage = proved("p1", "d1")
    stage.arrives("r")
    stage.prefilled("r", tokens=10)
    stage.first_token("r")
    stage.finishes("r", usage=Usage(prompt_tokens=11, completion_tokens=4))
    assert stage.pairs() == {"p1>d1": "aside"}
    assert "10 and 11" in stage.pair("p1", "d1").trouble


@pytest.mark.parametrize(("prefill", "decode"), [(10, 10), (0, 11), (10, 0), (0, 0)])
def test_a_count_that_is_the_same_or_was_not_told_condemns_nobody(prefill: int, decode: int) -> None:
    stage = proved("p1", "d1")
    stage.arrives("r")
    stage.prefilled("r", tokens=prefill)
    stage.first_token("r")
    stage.finishes("r", usage=Usage(prompt_tokens=decode, completion_tokens=4))
    assert stage.pairs() == {"p1>d1": "proved"}


def test_a_count_of_an_earlier_attempt_says_nothing_of_the_pair_that_answers() -> None:
    stage = Stage(fixed("p1"), fixed("d1"), fixed("p2", dialect=Dialect.SGLANG), fixed("d2", dialect=Dialect.SGLANG))
    for number in (1, 2):
        stage.proves(number)
    stage.arrives("r")
    stage.prefilled("r", tokens=10)
    stage.fails("r", Leg.DECODE, Failure.ERROR)
    assert stage.decisions[-1].decode == "d2"
    stage.finishes("r", usage=Usage(prompt_tokens=11, completion_tokens=4))
    assert stage.pairs() == {"p1>d1": "proved", "p2>d2": "proved"}


def test_a_condemned_pair_stays_aside_until_one_of_the_two_restarts() -> None:
    stage = proved("p1", "d1")
    miscounts(stage)
    stage.leaves("r")
    stage.released("r", attempt=1, freed=True)
    assert flown(stage.waits(36_000)) == []
    stage.loses("d1")
    stage.returns("d1")
    assert flown(stage.waits(3600)) == [], "the same engine is back"
    assert len(flown(stage.restarts("d1"))) == 1
    assert stage.pairs() == {"p1>d1": "unproved"}


def test_a_canary_under_way_does_not_clear_a_condemned_pair() -> None:
    """It asks for a completion: a chat's template may still count otherwise."""
    for ends in ("proves", "fails_canary"):
        stage = proved("p1", "d1")
        stage.waits(61)
        number = stage.pair("p1", "d1").canary
        assert number
        miscounts(stage)
        getattr(stage, ends)(number)
        assert stage.pairs() == {"p1>d1": "aside"}
        assert flown(stage.waits(3600)) == []


def test_the_workers_of_a_condemned_pair_prove_their_other_pairs_when_its_canary_has_ended() -> None:
    stage = proved("p1", "d1")
    stage.waits(61)
    number = stage.pair("p1", "d1").canary
    stage.joins(fixed("d2"))
    assert flown(stage.commands[-1]) == [], "p1 has one on its way"
    miscounts(stage)
    assert flown(stage.proves(number)) == [(number + 1, "p1>d2")]


# Workers that come and go while a canary flies


@pytest.mark.parametrize("ends", ["proves", "fails_canary"])
@pytest.mark.parametrize("befalls", ["restarts", "removes"])
def test_news_of_a_canary_to_an_engine_that_is_gone_changes_nothing(befalls: str, ends: str) -> None:
    stage = unproved()
    getattr(stage, befalls)("d1")
    before = stage.pairs()
    assert getattr(stage, ends)(1) == []
    assert stage.pairs() == before
    assert "proved" not in before.values()


def test_a_restarted_engine_is_proved_anew_at_once() -> None:
    stage = proved("p1", "p2", "d1")
    assert len(flown(stage.restarts("d1"))) == 1
    assert set(stage.pairs().values()) == {"unproved"}
    stage.arrives("r")
    assert stage.decisions[-1].why is Why.PAIR_UNPROVED


def test_a_restart_leaves_the_pairs_of_others_alone() -> None:
    stage = proved("p1", "p2", "d1", "d2")
    stage.restarts("p1")
    assert stage.pairs() == {"p1>d1": "unproved", "p1>d2": "unproved", "p2>d1": "proved", "p2>d2": "proved"}
    assert hands_over(stage, "r")[0] == "p2"


def test_an_engine_that_was_lost_and_is_the_same_keeps_what_was_proved() -> None:
    stage = proved("p1", "d1")
    stage.loses("p1")
    assert stage.returns("p1") == []
    assert stage.pairs() == {"p1>d1": "proved"}


def test_an_engine_that_does_not_tell_its_life_is_proved_anew_after_a_loss() -> None:
    stage = Stage(fixed("p1", incarnation=""), fixed("d1"))
    stage.proves(1)
    stage.loses("p1")
    stage.waits(30)
    assert flown(stage.returns("p1")) == [(2, "p1>d1")]
    assert stage.pairs() == {"p1>d1": "unproved"}


def test_an_engine_that_does_not_tell_its_life_and_was_never_away_keeps_what_was_proved() -> None:
    stage = Stage(fixed("p1", incarnation=""), fixed("d1"))
    stage.proves(1)
    assert stage.joins(fixed("p1", incarnation="", slots=4)) == []
    assert stage.pairs() == {"p1>d1": "proved"}


def test_an_engine_that_verifies_and_does_not_tell_its_life_is_trusted_after_a_loss() -> None:
    stage = Stage(worker("p1", incarnation=""), worker("d1"))
    stage.loses("p1")
    assert stage.returns("p1") == []
    assert stage.pair("p1", "d1").state is PairState.PROVED


def test_no_canary_flies_to_a_worker_that_is_lost_and_one_does_when_it_is_back() -> None:
    stage = unproved()
    stage.loses("d1")
    stage.fails_canary(1, was_tried=False, took_s=0.0)
    assert flown(stage.waits(600)) == []
    assert len(flown([*stage.returns("d1"), *stage.waits(1.1)])) == 1


def test_no_canary_flies_to_a_worker_that_drains() -> None:
    stage = unproved("p1", "d1", "d2")
    stage.drains("d2")
    stage.proves(1)
    assert flown(stage.waits(600)) == [(n, "p1>d1") for n, _ in flown(stage.commands[-1])]
    assert stage.pair("p1", "d2").state is PairState.UNPROVED


def test_no_canary_flies_while_the_gateway_ends() -> None:
    stage = unproved("p1", "d1", "d2")
    stage.gateway_drains()
    assert stage.proves(1) == []
    assert flown(stage.waits(600)) == []
    assert flown(stage.restarts("d1")) == []
    assert flown(stage.joins(fixed("d3"))) == []


def test_pairs_of_a_removed_worker_are_gone_and_it_is_new_when_it_is_back() -> None:
    stage = proved("p1", "d1", "d2")
    stage.removes("d1")
    assert stage.pairs() == {"p1>d2": "proved"}
    assert flown(stage.joins(fixed("d1"))) == [(stage.pair("p1", "d1").canary, "p1>d1")]


def test_a_worker_that_is_found_to_be_another_kind_of_engine_is_no_pair_any_more() -> None:
    stage = proved("p1", "d1")
    stage.joins(fixed("d1", reads_handoffs=False))
    assert stage.pairs() == {}
    stage.arrives("r")
    assert stage.decisions[-1].why is Why.NO_PAIR
    assert flown(stage.joins(fixed("d1"))) != []
    assert stage.pairs() == {"p1>d1": "unproved"}


def test_a_canary_to_a_removed_worker_frees_the_other_at_once() -> None:
    stage = unproved("p1", "d1", "d2")
    assert flown(stage.removes("d1")) == [(2, "p1>d2")]


def test_a_canary_whose_pair_is_no_more_frees_its_workers_for_others() -> None:
    stage = unproved("p1", "d1", "d2")
    assert flown(stage.joins(fixed("d1", reads_handoffs=False))) == [(2, "p1>d2")]
    assert stage.proves(1) == []
    assert stage.pairs() == {"p1>d2": "unproved"}


@pytest.mark.parametrize("how", ["asked", "probed"])
def test_a_change_of_role_asks_at_once_for_the_canaries_of_the_new_one(how: str) -> None:
    stage = Stage(stock("p1"), stock("p2"), stock("d1"))
    for number in (1, 2):
        stage.proves(number, took_s=1)
    assert stage.pairs()["p1>p2"] == "unproved"
    commands = stage.asks("p2", Role.DECODE) if how == "asked" else stage.joins(stock("p2", role=Role.DECODE))
    assert flown(commands) == [(3, "p1>p2")]
    stage.proves(3)
    assert stage.arrives("r") == [SendPrefill(request="r", attempt=1, worker="p1")]


# What a pair that is set aside does to who is on its way


def set_aside(stage: Stage, *names: str) -> None:
    """While other requests go on: the pair's canary fails."""
    stage.waits(61)
    number = stage.pair(*names).canary
    assert number, "no canary is under way"
    stage.fails_canary(number)


def test_a_pair_set_aside_while_its_request_is_prefilled_hands_nothing_over() -> None:
    stage = proved("p1", "d1")
    stage.arrives("r")
    set_aside(stage, "p1", "d1")
    commands = stage.prefilled("r")
    assert not any(isinstance(c, SendDecode) for c in commands)
    assert commands == [
        ReleaseHandle(request="r", attempt=1, worker="p1", reader=None),
        SendWhole(request="r", attempt=2, worker="d1"),
    ]
    assert stage.decisions[-1].why is Why.PAIR_ASIDE


def test_another_decode_worker_of_a_proved_pair_takes_it() -> None:
    stage = proved("p1", "d1", "d2")
    stage.arrives("r")
    reserved = stage.decisions[-1].decode
    assert reserved is not None
    stage.waits(61)
    while stage.pair("p1", reserved).canary == 0:
        number = next(pair.canary for pair in stage.controller.pairs() if pair.canary)
        stage.proves(number, took_s=0.01)
        stage.waits(5)
    stage.fails_canary(stage.pair("p1", reserved).canary)
    (sent,) = (c for c in stage.prefilled("r") if isinstance(c, SendDecode))
    assert sent.worker == ({"d1", "d2"} - {reserved}).pop()
    stage.finishes("r")
    assert stage.is_empty()


def test_a_pair_set_aside_after_the_handle_was_sent_is_left_to_finish() -> None:
    stage = proved("p1", "d1")
    stage.arrives("r")
    stage.prefilled("r")
    set_aside(stage, "p1", "d1")
    stage.first_token("r")
    stage.finishes("r")
    assert stage.is_empty()
    assert stage.pairs() == {"p1>d1": "aside"}, "one answer does not clear it"


def test_a_restart_of_the_reader_before_the_handoff_lets_nothing_over_unproved() -> None:
    stage = proved("p1", "d1")
    stage.arrives("r")
    stage.restarts("d1")
    commands = stage.prefilled("r")
    assert not any(isinstance(c, SendDecode) for c in commands)
    assert any(isinstance(c, SendWhole) for c in commands)


# What the driver is told: until when a token is to be trusted, and who may read what must be given back


@pytest.mark.parametrize(
    ("lease_s", "rules", "trusted_s"),
    [
        (None, Routing(), 28.0),
        (6.0, Routing(), 4.0),
        (None, Routing(lease_s=100.0, lease_margin_s=7.0), 93.0),
        (1.0, Routing(), -1.0),
    ],
)
def test_a_token_is_trusted_until_a_margin_before_the_lease_ends(
    lease_s: float | None, rules: Routing, trusted_s: float
) -> None:
    stage = Stage(fixed("p1", lease_s=lease_s), fixed("d1"), rules=rules)
    stage.proves(1)
    stage.waits(5)
    stage.arrives("r")
    stage.waits(2)
    (sent,) = stage.prefilled("r")
    assert isinstance(sent, SendDecode)
    assert sent.trusted_until == pytest.approx(5 + trusted_s), "from when P was asked: its answer may have been long on its way"


@pytest.mark.parametrize(
    ("prefill", "decode", "is_guarded"),
    [(worker, worker, False), (stock, worker, True), (worker, stock, True), (stock, stock, True)],
)
def test_only_where_both_verify_their_handles_there_is_nothing_to_guard(prefill: Any, decode: Any, is_guarded: bool) -> None:
    stage = Stage(prefill("p1", allowed_roles=P), decode("d1", allowed_roles=D))
    if is_guarded:
        stage.proves(1)
    stage.arrives("r")
    (sent,) = stage.prefilled("r")
    assert isinstance(sent, SendDecode)
    assert (sent.trusted_until is not None) == is_guarded


def released_by(commands: Iterable[Command]) -> list[str | None]:
    return [c.reader for c in commands if isinstance(c, ReleaseHandle)]


def test_a_handle_that_was_not_sent_is_read_by_a_partner_that_is_proved() -> None:
    stage = proved("p1", "d1", "d2")
    stage.arrives("r")
    reserved = stage.decisions[-1].decode
    stage.loses("d1")
    stage.loses("d2")
    assert released_by(stage.prefilled("r")) == [None], "nobody is there who could"
    for name in ("d1", "d2"):
        stage.returns(name)
    assert stage.handles == {HandleState.RELEASING: 1}
    assert reserved is not None


def test_a_worker_that_drains_may_still_read_what_must_be_given_back() -> None:
    stage = proved("p1", "d1", "d2")
    stage.arrives("r", prompt(100))
    stage.drains("d2")
    stage.loses("d1")
    commands = stage.prefilled("r")
    sent = [c.worker for c in commands if isinstance(c, SendDecode)]
    assert released_by(commands) == ["d2"] or sent == ["d2"]


@pytest.mark.parametrize("state", ["unproved", "aside"])
def test_no_pair_that_is_not_proved_reads_what_must_be_given_back(state: str) -> None:
    stage = proved("p1", "d1")
    stage.arrives("r")
    if state == "aside":
        set_aside(stage, "p1", "d1")
    else:
        stage.restarts("d1")
    assert released_by(stage.prefilled("r")) == [None]
    stage.released("r", attempt=1, freed=False)
    assert stage.handles == {HandleState.ORPHANED: 1}
    stage.waits(30)
    assert stage.handles == {}


@pytest.mark.parametrize("ends", ["leaves", "fails"])
def test_a_handle_that_was_sent_is_presented_to_nobody_else(ends: str) -> None:
    stage = proved("p1", "d1", "d2")
    stage.arrives("r")
    stage.prefilled("r")
    commands = stage.leaves("r") if ends == "leaves" else stage.fails("r", Leg.DECODE, Failure.SUSPECT)
    assert released_by(commands) == [None]


# What becomes of a suspect request


def test_a_suspect_answer_is_prefilled_again_elsewhere() -> None:
    stage = proved("p1", "p2", "d1", "d2")
    stage.arrives("r")
    first = stage.decisions[-1]
    stage.prefilled("r")
    commands = stage.fails("r", Leg.DECODE, Failure.SUSPECT)
    second = stage.decisions[-1]
    assert SendPrefill(request="r", attempt=2, worker=str(second.prefill)) in commands
    assert {first.prefill, first.decode}.isdisjoint({second.prefill, second.decode})


def test_a_request_that_was_suspect_twice_is_served_whole_which_cannot_be_wrong() -> None:
    stage = proved("p1", "p2", "d1", "d2")
    stage.arrives("r")
    for _ in range(2):
        stage.prefilled("r")
        stage.fails("r", Leg.DECODE, Failure.SUSPECT)
    assert stage.decisions[-1].choice is Choice.COLOCATED
    assert stage.decisions[-1].why is Why.HANDOFF_FAILED


def test_a_suspect_request_that_nobody_can_serve_whole_is_told_503_after_its_last_try() -> None:
    stage = Stage(*(fixed(name, serves_whole=False) for name in ("p1", "d1")), rules=Routing(max_attempts=2, pair_strikes=9))
    stage.proves(1)
    stage.arrives("r")
    stage.prefilled("r")
    stage.fails("r", Leg.DECODE, Failure.SUSPECT)
    stage.prefilled("r")
    commands = stage.fails("r", Leg.DECODE, Failure.SUSPECT)
    assert FailRequest(request="r", status=503, reason=Reason.HANDOFF_FAILED, retry_after_s=1) in commands


def test_a_prefill_worker_that_restarted_takes_its_request_from_the_reader() -> None:
    """Its KV is gone, whatever the decode worker makes of the handle."""
    stage = proved("p1", "p2", "d1")
    stage.arrives("r")
    stage.prefilled("r")
    prefill = str(stage.decisions[-1].prefill)
    commands = stage.restarts(prefill)
    assert CancelLeg(request="r", attempt=1, leg=Leg.DECODE) in commands
    other = ({"p1", "p2"} - {prefill}).pop()
    assert SendPrefill(request="r", attempt=2, worker=other) in commands
    assert stage.handles == {}


def test_a_broken_connection_is_looked_at_before_anything_else_is_sent_that_way() -> None:
    stage = proved("p1", "d1")
    stage.arrives("r")
    stage.prefilled("r")
    commands = stage.fails("r", Leg.DECODE, Failure.BROKEN)
    assert ProbeWorker(worker="d1") in commands
    assert stage.arrives("s") == [SendWhole(request="s", attempt=1, worker="p1")]


# Facts of a canary that are kept


def test_what_a_canary_moved_in_which_time_is_its_pairs_bandwidth() -> None:
    stage = unproved()
    stage.proves(1, moved_bytes=3_000_000, moved_s=0.5)
    assert stage.pair("p1", "d1").bytes_per_s == 6e6


@pytest.mark.parametrize(("moved_bytes", "moved_s"), [(None, None), (5, None), (None, 0.1), (5, 0.0), (0, 0.1)])
def test_a_bandwidth_that_nobody_tells_is_not_guessed(moved_bytes: int | None, moved_s: float | None) -> None:
    stage = unproved()
    stage.proves(1, moved_bytes=moved_bytes, moved_s=moved_s)
    assert stage.pair("p1", "d1").state is PairState.PROVED
    assert stage.pair("p1", "d1").bytes_per_s is None


def test_a_canary_is_told_of_once() -> None:
    stage = unproved()
    stage.proves(1)
    assert stage.fails_canary(1) == []
    assert stage.proves(1) == []
    assert stage.proves(99) == []
    assert stage.pairs() == {"p1>d1": "proved"}


def test_the_drawing_of_a_worker_that_is_changed_in_its_limits_keeps_its_pairs() -> None:
    """What a probe learns later (slots, LoRAs) is no new engine."""
    stage = proved("p1", "d1")
    facts = msgspec.structs.replace(stage.worker("p1").facts, slots=3, loras=("a",), models=("m", "a"))
    assert stage.joins(facts) == []
    assert stage.pairs() == {"p1>d1": "proved"}
