"""Control group limits, read from files under a temporary root, and the garbage collector."""

import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.machine import (
    add_child_time,
    available_memory,
    child_cpu_seconds,
    freeze_loaded_objects,
    process_memory,
    raise_file_limit,
    thread_cpu_seconds,
    total_memory,
    usable_cores,
)

GIB = 1 << 30


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    return 64


def machine(root: Path, cgroup: str = "0::/", **files: str) -> Path:
    """A root folder with these files; `files` maps paths to contents."""
    texts = {"proc/self/cgroup": cgroup, "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {100 * GIB // 1024} kB\n"}
    for path, text in (texts | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")
    (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
    return root


def test_without_limits_the_whole_machine_is_usable(tmp_path: Path, cores: int) -> None:
    root = machine(tmp_path)
    assert usable_cores(root) == cores
    assert total_memory(root) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory(root) == 100 * GIB


def test_container_limits_of_cgroup_v2(tmp_path: Path, cores: int) -> None:
    root = machine(
        tmp_path,
        **{
            "sys/fs/cgroup/cpu.max": "350000 100000",
            "sys/fs/cgroup/memory.max": str(2 * GIB),
            "sys/fs/cgroup/memory.current": str(GIB),
            "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 8}",
        },
    )
    assert usable_cores(root) == 4
    assert total_memory(root) == 2 * GIB
    assert available_memory(root) == GIB + GIB // 4 + GIB // 8


def test_the_smallest_limit_of_all_parent_groups_applies(tmp_path: Path, cores: int) -> None:
    root = machine(
        tmp_path,
        "0::/pods/mine",
        **{
            "sys/fs/cgroup/pods/cpu.max": "200000 100000",
            "sys/fs/cgroup/pods/mine/cpu.max": "max 100000",
            "sys/fs/cgroup/pods/memory.max": str(GIB),
            "sys/fs/cgroup/pods/mine/memory.max": "max",
        },
    )
    assert usable_cores(root) == 2
    assert total_memory(root) == GIB


def test_container_limits_of_cgroup_v1_with_host_paths(tmp_path: Path, cores: int) -> None:
    root = machine(
        tmp_path,
        "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:cpuset:/\n0::/",
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 2),
            "sys/fs/cgroup/memory/memory.stat": (
                f"inactive_file 3\nactive_file 5\ntotal_inactive_file {GIB // 8}\ntotal_active_file {GIB // 4}"
            ),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    assert usable_cores(root) == 1
    assert total_memory(root) == GIB
    assert available_memory(root) == GIB // 2 + GIB // 8 + GIB // 4


def test_cgroup_v1_without_a_limit(tmp_path: Path, cores: int) -> None:
    root = machine(
        tmp_path,
        "4:memory:/\n3:cpu:/",
        **{
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert usable_cores(root) == cores
    assert total_memory(root) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory(root) == 100 * GIB


def test_a_system_without_cgroups_or_meminfo(tmp_path: Path, cores: int) -> None:
    assert usable_cores(tmp_path) == cores
    assert available_memory(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs /proc/meminfo")
def test_this_machine_has_memory() -> None:
    assert 0 < (available_memory() or 0) <= total_memory() < 1 << 50


@pytest.fixture
def restored_gc() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's default; conftest.py has changed it
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("restored_gc")
def test_loaded_objects_are_excluded_from_collection() -> None:
    loaded: list[object] = [[]]
    freeze_loaded_objects()
    created: list[object] = [[]]
    tracked = {id(one) for one in gc.get_objects()}
    assert id(loaded) not in tracked
    assert id(created) in tracked


@pytest.mark.usefixtures("restored_gc")
def test_a_step_of_many_sequences_does_not_trigger_a_collection() -> None:
    freeze_loaded_objects()
    before = gc.get_stats()[0]["collections"]
    step = [[i] for i in range(5 * 256)]
    assert gc.get_stats()[0]["collections"] == before
    del step


@pytest.mark.usefixtures("restored_gc")
def test_cycles_are_still_collected() -> None:
    freeze_loaded_objects()
    collected = []
    gc.callbacks.append(lambda phase, info: collected.append(info["collected"]))
    try:
        for _ in range(30_000):
            cycle: list[object] = []
            cycle.append(cycle)
    finally:
        gc.callbacks.pop()
    assert sum(collected) > 20_000


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [
        (1024, 4096, 65536, 4096),
        (1024, resource.RLIM_INFINITY, 65536, 65536),
        (1024, 1 << 20, 65536, 65536),
        (70000, 1 << 20, 65536, 70000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 65536, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_of_files_is_raised(
    soft: int, hard: int, most: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append(limit))
    assert raise_file_limit(most) == raised
    assert limits[-1] == (raised, hard)


def test_the_memory_of_a_process_has_no_pages_of_files(tmp_path: Path) -> None:
    status = "Name:\tpaceline\nRssAnon:\t  1000 kB\nRssFile:\t  5000 kB\nRssShmem:\t  24 kB"
    machine(tmp_path, **{"proc/self/status": status})
    assert process_memory(root=tmp_path) == 1024 * 1024
    assert process_memory(7, root=tmp_path) == 0
    before, block = process_memory(), b"x" * (64 << 20)
    assert process_memory() - before > len(block) // 2


def test_the_time_of_a_child_counts_for_the_thread_that_asked(tmp_path: Path) -> None:
    machine(tmp_path, **{"proc/7/stat": "7 (a (b) c) S 1 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 1 0 1"})
    assert child_cpu_seconds(7, tmp_path) == 127 / os.sysconf("SC_CLK_TCK")
    assert child_cpu_seconds(8, tmp_path) == 0.0
    before = thread_cpu_seconds()
    add_child_time(100.0)
    assert 100.0 <= thread_cpu_seconds() - before < 101.0
    other: list[float] = []
    thread = threading.Thread(target=lambda: other.append(thread_cpu_seconds()))
    thread.start()
    thread.join()
    assert other[0] < 1.0
