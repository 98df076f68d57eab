"""Reads what this process may use of its machine: affinity, container limits, free memory, free shared memory.

Whatever a system does not tell (macOS has no affinity, no cgroups and no /dev/shm) is None or a plain count.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use. None is unknown, and not checked.

    `cores` are ids, hardware threads of one core side by side; empty where processes cannot be bound to any. `cpus` is how many
    of them may compute at once: less than `len(cores)` under a container's quota.
    """

    cores: tuple[int, ...]
    cpus: int
    memory_bytes: int | None = None
    shared_memory_bytes: int | None = None


def read_machine(root: Path = Path("/")) -> Machine:
    """`root` is where the system's own files are looked for."""
    cores = _cores(root)
    quota = _cpu_quota(root)
    count = len(cores) or os.cpu_count() or 1
    return Machine(
        cores=cores,
        cpus=count if quota is None else max(1, min(count, math.floor(quota))),
        memory_bytes=_memory_bytes(root),
        shared_memory_bytes=_free_bytes(root / "dev/shm"),  # it is read, nothing is written there
    )


def _cores(root: Path) -> tuple[int, ...]:
    """The ids this process may run on, hardware threads of one core side by side, so that neighbours go to one worker."""
    if root != Path("/") and (online := _read(root / "sys/devices/system/cpu/online")):  # another machine's, and all of them
        return tuple(sorted(_ids(online), key=lambda core: (_first_sibling(root, core), core)))
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return tuple(sorted(os.sched_getaffinity(0), key=lambda core: (_first_sibling(root, core), core)))


def _ids(text: str) -> list[int]:
    """``0-2,5`` as Linux writes it."""
    ends = (part.partition("-") for part in text.split(","))
    return [core for first, _, last in ends for core in range(int(first), int(last or first) + 1)]


def _first_sibling(root: Path, core: int) -> int:
    text = _read(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    first = text.replace("-", ",").split(",")[0] if text else ""
    return int(first) if first.isdecimal() else core


def _cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time a container may use, the tightest of the limits above this process."""
    quotas: list[float] = []
    for folder in _cgroups(root, ""):
        limit, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        if limit.isdecimal() and period.isdecimal():
            quotas.append(int(limit) / int(period))
    for folder in _cgroups(root, "cpu"):
        limit, period = _read(folder / "cpu.cfs_quota_us") or "", _read(folder / "cpu.cfs_period_us") or ""
        if limit.isdecimal() and period.isdecimal():
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def _memory_bytes(root: Path) -> int | None:
    """What can still be taken: the machine's available memory, or less under a container's limit."""
    known: list[int] = []
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            known.append(int(value.split()[0]) * 1024)
    for controller, limit_name, used_name, cache_name in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroups(root, controller):
            limit, used = _read(folder / limit_name) or "", _read(folder / used_name) or ""
            if limit.isdecimal() and used.isdecimal():
                known.append(int(limit) - int(used) + _stat(folder / "memory.stat", cache_name))
    return max(0, min(known)) if known else None


def _cgroups(root: Path, controller: str) -> list[Path]:
    """This process's group and all above it, of version 1's `controller` or, when that is empty, of version 2.

    Inside a container the path that the kernel tells may lie outside what is mounted; the mount's own root is always among
    the answers, and files that are not there are no limits.
    """
    mount = root / "sys/fs/cgroup" / controller
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = mount / path.lstrip("/")
            return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return [mount]


def _stat(path: Path, name: str) -> int:
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _free_bytes(folder: Path) -> int | None:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _read(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip()
    return None
