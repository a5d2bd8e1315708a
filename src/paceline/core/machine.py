"""What this process may use of its machine: processor, cores, memory, priority, garbage collector and device memory.

The limits of a container's control groups (v1 or v2) apply. `os.cpu_count` and `/proc/meminfo` report the whole node: a pod
that trusts them starts too many threads, or exceeds its memory limit and is killed.

`device_shares` divides a device's memory among its workers. `phase` logs the duration of each phase of a start, and reports it
while it runs to what shows it.
"""

import ctypes
import gc
import json
import logging
import math
import os
import platform
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.errors import InvalidConfig

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

GIB = 1 << 30
"""Bytes of a GiB."""
MAX_FILES = 1 << 16
"""Open files that a server wants."""
_ROOT = Path("/")
_YOUNG_OBJECTS = 10_000
"""New objects that trigger a collection of the youngest generation. Python's default of 700 triggers one in every step of a
large batch, and the objects of a step are freed by reference counts anyway."""


_ARM_PARTS = {
    "0xd07": "Cortex-A57", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2", "0xd84": "Neoverse-V3", "0xd8e": "Neoverse-N3",
}  # fmt: skip
"""Names of Arm's cores: Linux reports numbers."""


def cpu_name(root: Path = _ROOT) -> str:
    """Name of the processor, such as Neoverse-N1."""
    lines = _lines(root / "proc/cpuinfo")
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    part = found.get("CPU part", "")
    return found.get("model name") or _ARM_PARTS.get(part) or platform.processor() or platform.machine()


def raise_file_limit(most: int = MAX_FILES) -> int:
    """Raises the soft limit of open files to the hard one, at most to `most`. Returns the limit. Many systems start processes
    with 1,024, which is fewer than a server's connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    with suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def usable_cores(root: Path = _ROOT) -> int:
    """Cores of its affinity mask, or fewer if a CPU quota allows fewer."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [present]
    for group in _groups(root, "cpu"):
        v2 = _words(group / "cpu.max")
        quota, period = v2 if len(v2) == 2 else (_word(group / "cpu.cfs_quota_us"), _word(group / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit() and int(period):  # "max" or -1: no limit
            quotas.append(max(1, math.ceil(int(quota) / int(period))))
    return min(quotas)


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of the machine, or the memory limit if that is less."""
    limits = [limit for group in _groups(root, "memory") if (limit := _limit(group)) is not None]
    return min([*limits, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")])


def available_memory(root: Path = _ROOT) -> int | None:
    """Unused bytes, page cache counted as unused; None if the system does not report it."""
    free = [1024 * int(size) for size in [_entry(root / "proc/meminfo", "MemAvailable:")] if size]
    for group in _groups(root, "memory"):
        limit, used = _limit(group), _word(group / "memory.current") or _word(group / "memory.usage_in_bytes")
        if limit is not None and used.isdigit():
            # The active page cache (files read twice, such as a model loaded before) is reclaimable too
            files = sum(_stat_bytes(group / "memory.stat", f"{kind}_file") for kind in ("inactive", "active"))
            free.append(max(0, limit - int(used) + files))
    return min(free, default=None)


def process_memory(pid: int | None = None, root: Path = _ROOT) -> int:
    """Bytes of a process that only its end or swapping frees: resident memory without pages of files. This process by default;
    0 if it has ended."""
    status = root / f"proc/{pid or 'self'}/status"
    return 1024 * sum(int(_entry(status, name) or 0) for name in ("RssAnon:", "RssShmem:"))


def release_memory() -> None:
    """Give freed memory back to the system. The allocator of glibc keeps it for later."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another library than glibc
        ctypes.CDLL(None).malloc_trim(0)


_time_of_children = threading.local()


def thread_cpu_seconds() -> float:
    """Processor time of this thread, and of the children that have answered it (`core/child.py`)."""
    return time.thread_time() + getattr(_time_of_children, "seconds", 0.0)


def add_child_time(seconds: float) -> None:
    """A child has worked for this thread."""
    _time_of_children.seconds = getattr(_time_of_children, "seconds", 0.0) + seconds


def child_cpu_seconds(pid: int, root: Path = _ROOT) -> float:
    """Processor time of a child and of its own children that have ended. 0 if it has ended."""
    line = " ".join(_lines(root / f"proc/{pid}/stat"))
    times = line.rpartition(")")[2].split()[11:15]  # the name in parentheses may have spaces
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def measured(charge: Callable[[float], None], function: Callable[..., Result], *args: Any) -> Result:
    """What `function` returns. `charge` receives its processor time, also if it raises."""
    began = thread_cpu_seconds()
    try:
        return function(*args)
    finally:
        charge(thread_cpu_seconds() - began)


def lower_priority(nice: int) -> None:
    """Yield processors to other processes, also where Linux divides the processors between sessions first: a nice value counts
    within a session alone, and the session of this process gets the same value."""
    os.nice(nice)
    with suppress(OSError):  # a kernel without sessions' priorities
        (_ROOT / "proc/self/autogroup").write_text(str(nice))


def freeze_loaded_objects() -> None:
    """Exclude all objects of this moment from garbage collection, and collect younger ones less often.

    A server calls it once the model is loaded: a full collection otherwise pauses it for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *older)


def _limit(group: Path) -> int | None:
    """Limit of a memory group in bytes. Without a limit, v1 reports a number larger than any memory."""
    limit = _word(group / "memory.max") or _word(group / "memory.limit_in_bytes")
    return int(limit) if limit.isdigit() else None


def _stat_bytes(stat: Path, name: str) -> int:
    """Bytes of `name`, subgroups included; v1 names that total `total_{name}`."""
    return int(_entry(stat, f"total_{name}") or _entry(stat, name) or 0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups of this process and of all their ancestors; each limits it. In a container the listed
    paths may be those of the host, so folders that do not exist are skipped."""
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
    """The word after `name` at the start of a line; empty if there is none."""
    return next((words[1] for line in _lines(path) if (words := line.split()) and words[0] == name), "")


SHARED_MEMORY = 0.85
"""Share of a device's memory that its workers divide among themselves, unless `limits.memory_fraction` is set."""


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """One worker's claim on the memory of its devices."""

    name: str
    devices: tuple[str, ...]
    weight: float
    """Weight relative to the other claims on a device."""
    given: float | None = None
    """Configured fraction. If None, the worker gets a share by weight."""


def device_shares(claims: Sequence[MemoryClaim]) -> dict[str, float]:
    """Memory fraction of each worker, by name. Configured fractions are kept; the rest of `SHARED_MEMORY` is divided by weight.
    A worker on several devices gets the smallest of its shares on all of them."""
    by_device: dict[str, list[MemoryClaim]] = {}
    for claim in claims:
        for device in claim.devices:
            by_device.setdefault(device, []).append(claim)
    shares: dict[str, float] = {}
    for device, sharing in by_device.items():
        given = sum(claim.given for claim in sharing if claim.given is not None)
        weight = sum(claim.weight for claim in sharing if claim.given is None)
        if given > 1.0 or (weight and given >= SHARED_MEMORY):
            names = ", ".join(claim.name for claim in sharing)
            raise InvalidConfig(
                f"the workers on {device} ({names}) need {given:.2f} of its memory: lower limits.memory_fraction, or assign "
                "them to other devices"
            )
        for claim in sharing:
            share = (SHARED_MEMORY - given) * claim.weight / weight if claim.given is None else claim.given
            shares[claim.name] = min(share, shares.get(claim.name, 1.0))
    return shares


REPORT_SECONDS = 0.1
"""Time between two reports of a running phase, at least."""


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """A phase has begun, has advanced, or has ended."""

    phase: str
    done: float | None = None
    """Share of the work that is done. None if it is not known."""
    seconds: float | None = None
    """Duration of a phase that has ended. None while it runs."""
    note: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_record(record: Any) -> "PhaseReport | None":
        """The report in a line of a worker's standard error. None for a log record."""
        return PhaseReport(**record) if isinstance(record, dict) and "phase" in record else None


_listeners: list[Callable[[PhaseReport], None]] = []
_running: "list[Phase]" = []


@contextmanager
def reporting_to(listener: Callable[[PhaseReport], None]) -> Iterator[None]:
    """`listener` receives the reports of this process inside the block, in the thread of the phase."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclass(slots=True)
class Phase:
    name: str
    note: str = ""
    """What the phase did, for the end of its log line."""
    reported: float = 0.0
    """Time of the last report."""


@contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Report the phase, and log how long the context took, unless it raised."""
    running, began = Phase(name), time.perf_counter()
    _running.append(running)
    _report(PhaseReport(name))
    try:
        yield running
    finally:
        _running.remove(running)
    log_phase(running.name, time.perf_counter() - began, running.note)


def log_phase(name: str, seconds: float, note: str = "") -> None:
    """Report and log a phase that has ended."""
    _report(PhaseReport(name, seconds=seconds, note=note))
    logger.info("start: %s took %.1f s%s", name, seconds, f" ({note})" if note else "")


def show_share(done: float) -> None:
    """Report which share of the phase that runs now is done. Threads of the phase may call it."""
    now, running = time.perf_counter(), _running[-1:]
    for current in running:
        if now - current.reported >= REPORT_SECONDS:
            current.reported = now
            _report(PhaseReport(current.name, done))


def _report(report: PhaseReport) -> None:
    for listener in _listeners:
        listener(report)
