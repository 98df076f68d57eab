"""The ledger: whatever comes in whatever order, a handle ends once, and nothing good is ever lost or given twice."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twinpool.errors import HandleError, Reason
from twinpool.worker.handles import HandleLedger

LEASE_S = 30.0


def ledger_with(*handles: str) -> HandleLedger:
    ledger = HandleLedger(LEASE_S)
    for handle in handles:
        ledger.hold(handle, f"signature of {handle}", f"{handle}.kv", 100, now=0.0)
    return ledger


def reason_of(error: pytest.ExceptionInfo[HandleError]) -> tuple[int, Reason]:
    return error.value.status, error.value.reason


def test_a_claim_spends_the_handle_once() -> None:
    ledger = ledger_with("a")
    assert ledger.claim("a", 29.9).file_name == "a.kv"
    with pytest.raises(HandleError) as second:
        ledger.claim("a", 29.9)
    assert reason_of(second) == (409, Reason.HANDLE_SPENT)
    assert ledger.ends == {"spent": 1}


def test_a_claim_at_the_end_of_the_lease_is_too_late_even_before_the_reaper_came() -> None:
    ledger = ledger_with("a")
    with pytest.raises(HandleError) as late:
        ledger.claim("a", 30.0)
    assert reason_of(late) == (410, Reason.HANDLE_EXPIRED)
    assert [held.handle_id for held in ledger.expire(30.0)] == ["a"], "its file is still the reaper's to remove"


def test_what_nobody_holds_is_unknown() -> None:
    with pytest.raises(HandleError) as unknown:
        ledger_with("a").claim("b", 0.0)
    assert reason_of(unknown) == (410, Reason.HANDLE_UNKNOWN)


def test_releasing_twice_is_no_error_and_frees_once() -> None:
    ledger = ledger_with("a")
    assert ledger.release("a", 1.0) is not None
    assert ledger.release("a", 1.0) is None
    with pytest.raises(HandleError) as claimed:
        ledger.claim("a", 1.0)
    assert claimed.value.status == 410


def test_a_spent_handle_cannot_be_released() -> None:
    ledger = ledger_with("a")
    ledger.claim("a", 1.0)
    with pytest.raises(HandleError) as released:
        ledger.release("a", 1.0)
    assert reason_of(released) == (409, Reason.HANDLE_SPENT)


def test_an_identifier_is_never_used_again() -> None:
    ledger = ledger_with("a")
    ledger.claim("a", 1.0)
    with pytest.raises(ValueError, match="exists"):
        ledger.hold("a", "", "a.kv", 1, now=2.0)


def test_leases_end_in_order() -> None:
    ledger = ledger_with("a")
    ledger.hold("b", "", "b.kv", 7, now=5.0)
    assert ledger.next_expiry() == 30.0
    assert ledger.held_bytes() == 107
    assert [held.handle_id for held in ledger.expire(34.9)] == ["a"]
    assert ledger.next_expiry() == 35.0


class AnyOrder(RuleBasedStateMachine):
    """A model of the ledger that knows only, for each handle, until when it is good and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = HandleLedger(LEASE_S)
        self.now = 0.0
        self.good_until: dict[str, float] = {}
        self.ended: dict[str, str] = {}

    handles = st.integers(0, 6).map(str)

    @rule(seconds=st.sampled_from([0.0, 0.5, 10.0, 29.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def hold(self) -> None:
        handle = str(len(self.good_until))
        self.ledger.hold(handle, "", f"{handle}.kv", 1, self.now)
        self.good_until[handle] = self.now + LEASE_S

    @rule(handle=handles, what=st.sampled_from(["claim", "release"]))
    def end(self, handle: str, what: str) -> None:
        is_good = handle in self.good_until and handle not in self.ended and self.now < self.good_until[handle]
        try:
            held = self.ledger.claim(handle, self.now) if what == "claim" else self.ledger.release(handle, self.now)
        except HandleError:
            assert not is_good
            return
        if held is None:
            assert self.ended[handle] == "released"
            return
        assert is_good
        self.ended[handle] = {"claim": "spent", "release": "released"}[what]

    @rule()
    def reap(self) -> None:
        for held in self.ledger.expire(self.now):
            assert held.handle_id not in self.ended
            assert self.good_until[held.handle_id] <= self.now
            self.ended[held.handle_id] = "expired"

    @invariant()
    def every_handle_is_held_or_ended_once(self) -> None:
        assert len(self.ledger) == len(self.good_until) - len(self.ended)
        assert self.ledger.ends.total() == len(self.ended)


TestAnyOrder = AnyOrder.TestCase
