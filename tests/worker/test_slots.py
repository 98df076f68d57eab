"""Slots: in order, exactly once, and to the request that can use what they hold."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.errors import OverloadedError, UnavailableError
from twinpool.worker.engine import packed
from twinpool.worker.slots import SlotPool, Ticket, reusable_tokens

BLOCK = 4


class Engine:
    """Lets go of a dropped slot when told to."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.let_go = asyncio.Event()

    async def settle(self, slot: int) -> None:
        self.asked.append(slot)
        await self.let_go.wait()


def pool_of(slots: int, queue_limit: int = 8) -> tuple[SlotPool, Engine]:
    engine = Engine()
    return SlotPool(slots, queue_limit, BLOCK, engine.settle), engine


async def test_slots_come_in_the_order_of_joining() -> None:
    pool, _ = pool_of(1)
    first, second, third = (pool.join(b"") for _ in range(3))
    assert await first.slot() is not None
    assert (pool.running, pool.waiting) == (1, 2)
    first.leave()
    assert await second.slot(1.0) is not None
    with pytest.raises(UnavailableError) as late:
        await third.slot(0.001)
    assert late.value.status == 503
    assert late.value.retry_after_s


async def test_a_full_queue_refuses_at_once_but_not_what_runs_already() -> None:
    pool, _ = pool_of(1, queue_limit=1)
    running, waiting = pool.join(b""), pool.join(b"")
    with pytest.raises(OverloadedError) as full:
        pool.join(b"")
    assert (full.value.status, full.value.retry_after_s) == (429, 1)
    further = pool.join(b"", next_in_line=True)
    running.leave()
    await further.slot(1.0)
    assert pool.waiting == 1
    waiting.leave()


async def test_who_leaves_the_queue_takes_nothing_along() -> None:
    pool, _ = pool_of(1)
    first, second, third = (pool.join(b"") for _ in range(3))
    second.leave()
    first.leave()
    await third.slot(1.0)
    third.leave()
    assert (pool.running, pool.waiting) == (0, 0)


async def test_a_slot_is_given_back_once() -> None:
    pool, _ = pool_of(1)
    ticket = pool.join(b"")
    ticket.leave()
    with pytest.raises(RuntimeError, match="twice"):
        ticket.leave()
    assert pool.running == 0


async def test_a_dropped_slot_comes_back_only_when_the_engine_has_let_go() -> None:
    pool, engine = pool_of(1)
    async with pool.join(b"") as ticket:
        slot = await ticket.slot()
        slot.prompt = packed([1, 2, 3])
        ticket.dropped = True
    after = pool.join(b"")
    with pytest.raises(UnavailableError):
        await after.slot(0.01)
    assert engine.asked == [slot.number]
    engine.let_go.set()
    assert (await after.slot(1.0)).prompt == b"", "nobody knows what it holds now"
    after.leave()
    await pool.settled()


async def test_the_slot_that_holds_the_prompt_is_preferred_then_the_one_unused_for_longest() -> None:
    pool, _ = pool_of(3)
    tickets = [pool.join(b"") for _ in range(3)]
    slots = [await ticket.slot() for ticket in tickets]
    slots[1].prompt = packed(list(range(20)))
    for ticket in (tickets[2], tickets[0], tickets[1]):
        ticket.leave()
    similar, other = pool.join(packed([*range(10), 99, 98])), pool.join(packed([77] * 12))
    assert (await similar.slot()).number == 1
    assert (await other.slot()).number == 2
    similar.leave()
    other.leave()


async def test_busy_time_runs_only_while_a_slot_is_taken() -> None:
    pool, _ = pool_of(1)
    assert pool.busy_s() == 0.0
    ticket = pool.join(b"")
    assert pool.busy_s() > 0.0
    ticket.leave()
    assert pool.busy_s() == pool.busy_s()


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), min_size=1, max_size=40))
def test_reuse_is_a_common_prefix_in_whole_blocks_that_leaves_work(held: list[int], wanted: list[int]) -> None:
    reused = reusable_tokens(packed(held), packed(wanted), BLOCK)
    assert reused % BLOCK == 0
    assert held[:reused] == wanted[:reused]
    assert reused == 0 or (reused <= len(held) - 1 and reused <= len(wanted) - 2)
    longer = reused + BLOCK
    assert held[:longer] != wanted[:longer] or longer > len(held) - 1 or longer > len(wanted) - 2


@given(st.lists(st.sampled_from(["join", "front", "leave", "drop"]), max_size=60), st.integers(1, 3))
def test_no_slot_is_lost_or_given_twice(moves: list[str], slots: int) -> None:
    async def play() -> None:
        pool, engine = pool_of(slots)
        engine.let_go.set()
        tickets: list[Ticket] = []
        for move in moves:
            if move in ("join", "front"):
                try:
                    tickets.append(pool.join(b"", next_in_line=move == "front"))
                except OverloadedError:
                    assert pool.waiting >= 8
            elif tickets:
                ticket = tickets.pop(len(tickets) // 2)
                ticket.dropped = move == "drop"
                ticket.leave()
                await asyncio.sleep(0)
            assert 0 <= pool.running <= slots
            assert not pool.waiting or pool.running == slots
        for ticket in tickets:
            ticket.leave()
        await pool.settled()
        assert (pool.running, pool.waiting) == (0, 0)

    asyncio.run(play())
