import pytest

from twinpool.sim.link import Ports, handed_over_at


def test_bytes_over_bandwidth_and_the_latency() -> None:
    assert handed_over_at(1.0, 10**9, Ports.of(1e9), Ports.of(4e9), 0.5) == pytest.approx(2.5)


def test_both_ends_are_shared() -> None:
    one, two, into = Ports.of(1e9), Ports.of(1e9), Ports.of(1e9)
    assert handed_over_at(0.0, 10**9, one, into, 0.0) == pytest.approx(1.0)
    assert handed_over_at(0.0, 10**9, two, into, 0.0) == pytest.approx(2.0)
    assert handed_over_at(0.0, 10**9, one, Ports.of(1e9), 0.0) == pytest.approx(2.0)


def test_in_and_out_do_not_share() -> None:
    both = Ports.of(1e9)
    handed_over_at(0.0, 10**9, both, Ports.of(1e9), 0.0)
    assert handed_over_at(0.0, 10**9, Ports.of(1e9), both, 0.0) == pytest.approx(1.0)
