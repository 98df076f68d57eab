import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.deploy.plan import CONTEXT_TOKENS, SLOTS, Footprint, Wanted, plan_workers
from twinpool.errors import UserError
from twinpool.machine import Machine

SMALL = Footprint(file_bytes=144_811_072, kv_token_bytes=23_040, context_tokens=8192)

counts = st.integers(0, 6)
wanteds = st.tuples(counts, counts, counts).filter(any).map(lambda n: Wanted(*n))
core_sets = st.lists(st.integers(0, 255), min_size=1, max_size=64, unique=True).map(tuple)


@given(core_sets, wanteds)
def test_enough_cores_are_shared_out_whole_and_fairly(cores: tuple[int, ...], wanted: Wanted) -> None:
    plan = plan_workers(Machine(cores, len(cores)), wanted, SMALL)
    if len(cores) < len(plan.workers):
        return
    used = [core for worker in plan.workers for core in worker.cores] + list(plan.gateway_cores)
    assert sorted(used) == sorted(cores)
    shares = [len(worker.cores) for worker in plan.workers]
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)  # what does not divide evenly goes to those that read prompts
    assert [worker.threads for worker in plan.workers] == shares
    assert len(plan.gateway_cores) == (len(cores) > 2 * len(plan.workers))
    assert not plan.notes


@given(core_sets, wanteds)
def test_too_few_cores_are_shared_and_said(cores: tuple[int, ...], wanted: Wanted) -> None:
    plan = plan_workers(Machine(cores, len(cores)), wanted, SMALL)
    if len(cores) >= len(plan.workers):
        return
    assert {core for worker in plan.workers for core in worker.cores} == set(cores)
    assert {worker.threads for worker in plan.workers} == {1}
    assert f"{len(plan.workers)} workers share" in plan.notes[0]


@given(wanteds)
def test_the_roles_asked_for_are_planned_each_under_its_own_name(wanted: Wanted) -> None:
    workers = plan_workers(Machine((), 4), wanted, SMALL).workers
    roles = [worker.role for worker in workers]
    assert (roles.count("prefill"), roles.count("decode"), roles.count("colocated")) == (
        wanted.prefill,
        wanted.decode,
        wanted.colocated,
    )
    assert len({worker.id for worker in workers}) == len(workers)


def test_two_cores_give_one_to_each() -> None:
    prefill, decode = plan_workers(Machine((0, 1), 2), Wanted(), SMALL).workers
    assert (prefill.id, prefill.cores, decode.id, decode.cores) == ("prefill-0", (0,), "decode-0", (1,))
    assert (prefill.slots, prefill.context_tokens) == (SLOTS, CONTEXT_TOKENS)


@pytest.mark.parametrize("machine", [Machine((), 3), Machine(tuple(range(64)), 3)], ids=["no affinity", "under a quota"])
def test_where_the_system_places_processes_only_threads_are_planned(machine: Machine) -> None:
    prefill, decode = plan_workers(machine, Wanted(), SMALL).workers
    assert (prefill.cores, prefill.threads, decode.cores, decode.threads) == ((), 2, (), 1)


def test_short_memory_takes_slots_then_context_then_says_so() -> None:
    def planned(memory_bytes: int) -> tuple[int, int]:
        plan = plan_workers(Machine((0, 1), 2, memory_bytes), Wanted(), SMALL)
        assert plan.worker_bytes is not None
        assert 2 * plan.worker_bytes <= memory_bytes
        assert bool(plan.notes) == (memory_bytes < 2_200_000_000)
        return plan.workers[0].slots, plan.workers[0].context_tokens

    assert planned(2_200_000_000) == (4, 8192)
    assert planned(1_400_000_000) == (2, 8192)
    assert planned(1_000_000_000) == (1, 8192)
    assert planned(800_000_000) == (1, 4096)
    with pytest.raises(UserError, match=r"too little memory: 2 workers with this model lack 204 MB \(500 MB are free\)"):
        planned(500_000_000)


def test_small_shared_memory_is_said_only_where_kv_passes_through_it() -> None:
    docker = Machine((0, 1), 2, shared_memory_bytes=64 << 20)
    with pytest.raises(UserError, match=r"too little shared memory: .* 377 MB, 67 MB are free .* --shm-size=1g"):
        plan_workers(docker, Wanted(), SMALL)
    assert len(plan_workers(docker, Wanted(0, 0, 2), SMALL).workers) == 2


def test_an_unknown_model_is_not_judged() -> None:
    plan = plan_workers(Machine((0, 1), 2, memory_bytes=1, shared_memory_bytes=1), Wanted(), Footprint(1))
    assert plan.worker_bytes is None


def test_a_model_made_for_short_texts_gets_no_more() -> None:
    assert plan_workers(Machine((0,), 1), Wanted(), Footprint(1, 1, 512)).workers[0].context_tokens == 512


@pytest.mark.parametrize("numbers", [(0, 0, 0), (-1, 1, 1)])
def test_numbers_that_make_no_fleet_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match="workers"):
        Wanted(*numbers)
