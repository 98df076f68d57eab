import os
from pathlib import Path

import pytest

from twinpool.machine import read_machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.cpus >= 1
    assert machine.memory_bytes is None or machine.memory_bytes > 0


@pytest.mark.usefixtures("four_cores")
def test_hardware_threads_of_one_core_stand_side_by_side(tmp_path: Path) -> None:
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    cpu = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {cpu.format(core): text for core, text in siblings.items()})
    assert read_machine(root).cores == (0, 2, 1, 3)


@pytest.mark.usefixtures("four_cores")
def test_another_machine_s_cores_are_those_it_says_it_has(tmp_path: Path) -> None:
    write(tmp_path, {"sys/devices/system/cpu/online": "0-2,8-9\n"})
    assert read_machine(tmp_path).cores == (0, 1, 2, 8, 9)


@pytest.mark.usefixtures("four_cores")
def test_the_tightest_limit_of_version_2_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/one\n",
            "proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n",
            "sys/fs/cgroup/pods/cpu.max": "250000 100000",
            "sys/fs/cgroup/pods/one/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/memory.max": "max",
            "sys/fs/cgroup/pods/memory.current": "5000000000",
            "sys/fs/cgroup/pods/one/memory.max": "3000000000",
            "sys/fs/cgroup/pods/one/memory.current": "1000000000",
            "sys/fs/cgroup/pods/one/memory.stat": "anon 5\ninactive_file 400000000\n",
        },
    )
    machine = read_machine(root)
    assert (machine.cpus, len(machine.cores)) == (2, 4)
    assert machine.memory_bytes == 2_400_000_000  # the page cache can be taken back


@pytest.mark.usefixtures("four_cores")
def test_version_1_and_paths_that_lie_outside_the_container(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000000",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000000\n",
        },
    )
    machine = read_machine(root)
    assert machine.cpus == 1  # half a CPU still has to do
    assert machine.memory_bytes == 1_600_000_000


def test_a_system_that_tells_nothing_is_still_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    machine = read_machine(tmp_path)
    assert (machine.cores, machine.memory_bytes, machine.shared_memory_bytes) == ((), None, None)
    assert machine.cpus == (os.cpu_count() or 1)


@pytest.mark.usefixtures("four_cores")
def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"})
    assert read_machine(tmp_path).cpus == 4
