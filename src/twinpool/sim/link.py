"""The handoff's way: KV leaves a prefill worker by its port and enters a decode worker by its own.

Each port passes one byte after the other, first asked first served, at the pair's bandwidth where that is less; the two ends
of one handoff overlap. So what a port carries never exceeds its bandwidth, however many share it, and nobody waits at one
port for another port that they do not use. Under fair sharing single handoffs end later and all of them together at the same
time."""

from typing import NamedTuple


class Port:
    """One worker's end: until when it is taken."""

    __slots__ = ("bytes_per_s", "free_at", "passed_bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0
        self.passed_bytes = 0

    def take(self, at: float, size: int, bytes_per_s: float) -> float:
        """When its last byte has passed."""
        self.free_at = max(at, self.free_at) + size / min(bytes_per_s, self.bytes_per_s)
        self.passed_bytes += size
        return self.free_at


class Ports(NamedTuple):
    """A worker's: full duplex."""

    out: Port
    into: Port

    @classmethod
    def of(cls, bytes_per_s: float) -> "Ports":
        return cls(Port(bytes_per_s), Port(bytes_per_s))


def handed_over_at(at: float, size: int, source: Ports, target: Ports, latency_s: float) -> float:
    """When the KV that is asked for now is in place. A handoff of nothing still takes the latency."""
    slower = min(source.out.bytes_per_s, target.into.bytes_per_s)
    return max(source.out.take(at, size, slower), target.into.take(at, size, slower)) + latency_s
