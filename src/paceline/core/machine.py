"""What this process may use of the machine: cores and memory, as far as a container's control groups (v1 or v2) let it.

A pod with a limit of 4 cores and 8 GiB on a node of 64 and 512 is not told so by the usual calls: 64 threads are then put to
sleep for most of the time, and memory past the limit is the end of the process.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Those it may be scheduled on, or as many as its quota comes to."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [present]
    for group in _groups(root, "cpu"):
        v2 = _words(group / "cpu.max")
        quota, period = v2 if len(v2) == 2 else (_word(group / "cpu.cfs_quota_us"), _word(group / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):  # "max" or -1: no limit
            quotas.append(max(1, math.ceil(int(quota) / int(period))))
    return min(quotas)


def total_memory(root: Path = _ROOT) -> int:
    """Bytes: the machine's, or the limit."""
    limits = [limit for group in _groups(root, "memory") if (limit := _limit(group)) is not None]
    return min([*limits, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")])


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that nobody uses, files that were read counted as nobody; None where the system does not say."""
    free = [1024 * int(size) for size in [_entry(root / "proc/meminfo", "MemAvailable:")] if size]
    for group in _groups(root, "memory"):
        limit, used = _limit(group), _word(group / "memory.current") or _word(group / "memory.usage_in_bytes")
        if limit is not None and used.isdigit():
            # Files read twice are active, and give way all the same: a model that was loaded before is one of them
            files = sum(_counted(group / "memory.stat", f"{kind}_file") for kind in ("inactive", "active"))
            free.append(max(0, limit - int(used) + files))
    return min(free, default=None)


def _limit(group: Path) -> int | None:
    """Of a memory group. v1 says "no limit" with a number that no machine reaches."""
    said = _word(group / "memory.max") or _word(group / "memory.limit_in_bytes")
    return int(said) if said.isdigit() else None


def _counted(stat: Path, name: str) -> int:
    """Bytes, of the groups below too: v1 has a name of its own for that."""
    return int(_entry(stat, f"total_{name}") or _entry(stat, name) or 0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The groups this process is in, and all above them: each limits it. In a container the paths named may be the host's,
    and what is mounted the container's own: those that are not there are passed over."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controllers or ".")
        inner = top / path.strip("/")
        yield from (group for group in (inner, *inner.parents) if group.is_relative_to(top) and group.is_dir())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _word(path: Path) -> str:
    return next(iter(_words(path)), "")


def _entry(path: Path, name: str) -> str:
    """The number after `name`, in a file of one a line."""
    return next((words[1] for line in _lines(path) if (words := line.split()) and words[0] == name), "")
