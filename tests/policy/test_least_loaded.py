"""Which way a request goes, given what the workers have to do."""

import pytest
from tests.core.stage import prompt, worker

from twinpool.config import Routing
from twinpool.core.cluster import Cluster, LegKey, Worker
from twinpool.core.decisions import Choice, Decision, Why
from twinpool.core.model import Dialect, Leg, Role, WorkerFacts
from twinpool.core.pairs import Pairs
from twinpool.core.policies import Pending
from twinpool.policy.least_loaded import disaggregate_when_possible, least_loaded_decode

WINDOW = 1000


def fleet(*workers: WorkerFacts) -> Cluster:
    cluster = Cluster()
    pairs = Pairs(cluster, Routing())
    for facts in workers:
        pairs.meet(cluster.join(facts), 0.0, is_new_engine=True)
    return cluster


def load(cluster: Cluster, name: str, *, prefill: int = 0, kv: int = 0, sequences: int = 1) -> None:
    key = LegKey(f"{name}-{len(cluster.legs_on(name))}", 1, Leg.WHOLE)
    cluster.take(key, cluster[name], prefill_tokens=prefill, kv_tokens=kv, sequences=sequences)


def route(
    cluster: Cluster, tokens: int = 100, *, avoid: frozenset[str] = frozenset(), sequences: int = 1, obstacle: Why | None = None
) -> Decision:
    pending = Pending(prompt(tokens, sequences=sequences, obstacle=obstacle), tokens, avoid)
    return disaggregate_when_possible(Routing(prefill_window_tokens=WINDOW))(pending, list(cluster))


def pair(prefill: str, decode: str) -> Decision:
    return Decision(Choice.DISAGGREGATED, Why.PAIR_READY, prefill=prefill, decode=decode)


def whole(why: Why, name: str) -> Decision:
    return Decision(Choice.COLOCATED, why, decode=name)


def wait(why: Why) -> Decision:
    return Decision(Choice.WAIT, why)


def test_nobody_is_there() -> None:
    assert route(fleet()) == wait(Why.NO_WORKER)


@pytest.mark.parametrize(
    ("names", "decision"),
    [
        (["p1", "d1"], pair("p1", "d1")),
        (["p1", "d1", "c1"], pair("p1", "d1")),
        (["c1"], whole(Why.NO_PREFILL_WORKER, "c1")),
        (["d1"], whole(Why.NO_PREFILL_WORKER, "d1")),
        (["p1"], whole(Why.NO_DECODE_WORKER, "p1")),
        (["c1", "d1"], whole(Why.NO_PREFILL_WORKER, "c1")),
        (["c1", "p1"], whole(Why.NO_DECODE_WORKER, "c1")),
    ],
)
def test_a_pair_where_there_is_one_else_one_worker(names: list[str], decision: Decision) -> None:
    assert route(fleet(*(worker(name) for name in names))) == decision


@pytest.mark.parametrize(
    ("one", "other", "hand_over"),
    [
        (Dialect.NIXL, Dialect.NIXL, True),
        (Dialect.SGLANG, Dialect.SGLANG, True),
        (Dialect.NIXL, Dialect.SGLANG, False),
        (None, None, False),
        (Dialect.NIXL, None, False),
    ],
)
def test_only_workers_of_one_dialect_are_a_pair(one: Dialect | None, other: Dialect | None, hand_over: bool) -> None:
    decision = route(fleet(worker("p1", dialect=one), worker("d1", dialect=other)))
    assert decision == (pair("p1", "d1") if hand_over else whole(Why.NO_PAIR, "d1"))


@pytest.mark.parametrize("why", [Why.N_CHOICES, Why.PROMPT_LIST])
def test_an_obstacle_keeps_the_request_on_one_worker(why: Why) -> None:
    assert route(fleet(worker("p1"), worker("d1")), obstacle=why) == whole(why, "d1")


def test_prefill_goes_where_fewest_tokens_wait_then_fewest_sequences_then_by_name() -> None:
    cluster = fleet(worker("p1"), worker("p2"), worker("p3"), worker("d1"))
    assert route(cluster) == pair("p1", "d1")
    load(cluster, "p1", prefill=10)
    assert route(cluster) == pair("p2", "d1")
    load(cluster, "p2", prefill=0)
    assert route(cluster) == pair("p3", "d1")
    load(cluster, "p3", prefill=20)
    load(cluster, "p2", prefill=15)
    assert route(cluster) == pair("p1", "d1")


def test_decode_goes_where_fewest_sequences_run_then_least_kv_then_by_name() -> None:
    cluster = fleet(worker("p1"), worker("d1"), worker("d2"))
    assert route(cluster) == pair("p1", "d1")
    load(cluster, "d1", kv=10)
    assert route(cluster) == pair("p1", "d2")
    load(cluster, "d2", kv=5)
    assert route(cluster) == pair("p1", "d2")
    load(cluster, "d2", kv=5)
    assert route(cluster) == pair("p1", "d1")


@pytest.mark.parametrize(
    ("given", "tokens", "goes"), [(0, 50_000, True), (900, 100, True), (900, 101, False), (1, WINDOW, False)]
)
def test_the_window_of_a_prefill_worker(given: int, tokens: int, goes: bool) -> None:
    cluster = fleet(worker("p1"), worker("d1"))
    if given:
        load(cluster, "p1", prefill=given)
    assert route(cluster, tokens) == (pair("p1", "d1") if goes else wait(Why.PREFILL_BUSY))


def test_a_full_decode_pool_makes_it_wait_before_anything_is_prefilled() -> None:
    cluster = fleet(worker("p1"), worker("d1", slots=1))
    load(cluster, "d1")
    assert route(cluster) == wait(Why.DECODE_BUSY)


def test_prefill_slots_count_too() -> None:
    cluster = fleet(worker("p1", slots=1), worker("d1"))
    load(cluster, "p1")
    assert route(cluster) == wait(Why.PREFILL_BUSY)


def test_an_engine_that_does_not_tell_its_slots_has_many() -> None:
    cluster = fleet(worker("p1"), worker("d1", slots=None))
    load(cluster, "d1", sequences=255)
    assert route(cluster) == pair("p1", "d1")
    load(cluster, "d1")
    assert route(cluster) == wait(Why.DECODE_BUSY)


def test_a_colocated_worker_takes_what_the_pairs_have_no_room_for() -> None:
    cluster = fleet(worker("p1"), worker("d1"), worker("c1", slots=1))
    load(cluster, "p1", prefill=WINDOW)
    assert route(cluster) == whole(Why.PREFILL_BUSY, "c1")
    load(cluster, "c1")
    assert route(cluster) == wait(Why.PREFILL_BUSY)


def test_a_full_pair_does_not_spill_onto_its_own_workers() -> None:
    cluster = fleet(worker("p1"), worker("d1"))
    load(cluster, "p1", prefill=WINDOW)
    assert route(cluster) == wait(Why.PREFILL_BUSY)


def test_one_worker_is_the_one_with_least_to_read_then_fewest_sequences() -> None:
    cluster = fleet(worker("c1"), worker("c2"))
    load(cluster, "c1", prefill=100)
    load(cluster, "c2", sequences=5)
    assert route(cluster) == whole(Why.NO_PREFILL_WORKER, "c2")
    load(cluster, "c2", prefill=100)
    assert route(cluster) == whole(Why.NO_PREFILL_WORKER, "c1")


def test_a_decode_server_that_cannot_read_a_prompt_is_never_given_one() -> None:
    assert route(fleet(worker("d1", serves_whole=False))) == wait(Why.NO_PREFILL_WORKER)
    both = fleet(worker("d1", serves_whole=False), worker("p1", dialect=None))
    assert route(both) == whole(Why.NO_PAIR, "p1")


@pytest.mark.parametrize(
    ("running", "sequences", "goes"), [(0, 3, True), (0, 9, True), (1, 3, True), (2, 3, False), (1, 9, False)]
)
def test_all_answers_of_a_request_need_room(running: int, sequences: int, goes: bool) -> None:
    cluster = fleet(worker("c1", slots=4))
    if running:
        load(cluster, "c1", sequences=running)
    decision = route(cluster, sequences=sequences, obstacle=Why.N_CHOICES)
    assert decision == (whole(Why.N_CHOICES, "c1") if goes else wait(Why.WORKERS_BUSY))


# Workers on which the request failed already


def test_the_workers_it_failed_on_are_avoided() -> None:
    cluster = fleet(*(worker(name) for name in ("p1", "p2", "d1", "d2")))
    load(cluster, "p2", prefill=500)
    load(cluster, "d2", sequences=5)
    assert route(cluster, avoid=frozenset({"p1", "d1"})) == pair("p2", "d2")


def test_they_are_taken_rather_than_none() -> None:
    cluster = fleet(worker("p1"), worker("d1"))
    assert route(cluster, avoid=frozenset({"p1", "d1"})) == pair("p1", "d1")
    assert route(fleet(worker("c1")), avoid=frozenset({"c1"})) == whole(Why.NO_PREFILL_WORKER, "c1")


def test_they_are_taken_where_no_other_has_a_partner() -> None:
    """The other prefill worker has its window free, and nobody who could read its KV."""
    cluster = fleet(worker("p1"), worker("p2", dialect=Dialect.SGLANG), worker("d1"))
    assert route(cluster, avoid=frozenset({"p1"})) == pair("p1", "d1")


def test_a_prefill_worker_without_a_partner_does_not_blur_the_reason() -> None:
    cluster = fleet(worker("p1"), worker("p2", dialect=Dialect.SGLANG), worker("d1"))
    load(cluster, "p1", prefill=WINDOW)
    assert route(cluster) == wait(Why.PREFILL_BUSY)


def test_avoiding_beats_colocated_first() -> None:
    cluster = fleet(worker("c1"), worker("d1"))
    assert route(cluster, avoid=frozenset({"c1"})) == whole(Why.NO_PREFILL_WORKER, "d1")


# Another decode worker for a prompt that is read


def pick(cluster: Cluster, avoid: frozenset[str] = frozenset()) -> str | None:
    workers: list[Worker] = list(cluster)
    return least_loaded_decode(Pending(prompt(), 100, avoid), cluster["p1"], workers)


def test_another_decode_worker_is_the_least_loaded_that_can_read_it() -> None:
    cluster = fleet(worker("p1"), worker("c1"), worker("d1", dialect=Dialect.SGLANG), worker("d2"), worker("d3", slots=1))
    assert pick(cluster) == "d2"
    load(cluster, "d2")
    assert pick(cluster) == "d3"
    load(cluster, "d3")
    assert pick(cluster) == "d2"
    assert pick(cluster, frozenset({"d2"})) == "d2", "rather than none"
    load(cluster, "d2", sequences=7)
    assert pick(cluster) is None


def test_the_role_counts_and_not_the_flag_it_was_started_with() -> None:
    cluster = fleet(worker("p1"), worker("c1"))
    cluster["c1"].role = Role.DECODE
    assert pick(cluster) == "c1"
    assert route(cluster) == pair("p1", "c1")
