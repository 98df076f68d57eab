"""Which two workers may be tried as a pair, and why others may not."""

import msgspec
import pytest
from tests.core.stage import worker

from twinpool.core.compatibility import why_not_compatible
from twinpool.core.model import Dialect

P, D = worker("p1"), worker("d1")


def but(facts, **changes):
    return msgspec.structs.replace(facts, **changes)


def test_two_of_a_kind_are_a_pair_both_ways() -> None:
    assert why_not_compatible(P, D) is None
    assert why_not_compatible(D, P) is None


def test_nobody_is_a_pair_with_itself() -> None:
    assert why_not_compatible(P, P) is not None


def test_who_hands_nothing_over_says_why() -> None:
    alone = but(P, dialect=None, obstacle="its connector is LMCache: not spoken")
    assert why_not_compatible(alone, D) == "p1 hands nothing over: its connector is LMCache: not spoken"
    assert why_not_compatible(P, but(D, dialect=None)) == "d1 hands nothing over: its engine has no handoff"


def test_two_dialects_do_not_meet() -> None:
    assert why_not_compatible(P, but(D, dialect=Dialect.SGLANG)) == "p1 hands over by nixl, d1 by sglang"


def test_never_a_handle_for_a_producer_nor_one_from_a_consumer() -> None:
    producer = but(D, reads_handoffs=False, kv_role="kv_producer")
    assert "kv_producer" in why_not_compatible(P, producer)
    assert why_not_compatible(producer, P) is None
    consumer = but(P, gives_handoffs=False, kv_role="kv_consumer")
    assert "kv_consumer" in why_not_compatible(consumer, D)
    assert why_not_compatible(D, consumer) is None


def test_the_difference_is_named() -> None:
    old = but(P, fingerprint=(("engine", "vllm 0.31"), ("block size", "32")))
    new = but(D, fingerprint=(("engine", "vllm 0.32"), ("block size", "16")))
    assert why_not_compatible(old, new) == "engine: p1 has vllm 0.31, d1 has vllm 0.32"
    new = but(new, fingerprint=(("engine", "vllm 0.31"), ("block size", "16")))
    assert why_not_compatible(old, new) == "block size: p1 has 32, d1 has 16"


def test_what_only_one_tells_is_no_difference() -> None:
    assert why_not_compatible(but(P, fingerprint=(("dtype", "bfloat16"),)), D) is None
    assert why_not_compatible(P, but(D, fingerprint=(("dtype", "bfloat16"),))) is None


@pytest.mark.parametrize(
    ("p", "d", "fits"), [(1, 1, True), (1, 4, True), (2, 4, True), (4, 1, False), (4, 2, False), (2, 3, False)]
)
def test_tensor_parallel_of_d_is_a_multiple_of_that_of_p(p: int, d: int, fits: bool) -> None:
    why = why_not_compatible(but(P, tensor_parallel=p), but(D, tensor_parallel=d))
    assert (why is None) is fits
    assert fits or "tensor parallel" in why
