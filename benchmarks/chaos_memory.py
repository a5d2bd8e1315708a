"""The memory of each process of a chaos run over time, and what each of them gained."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

SAMPLE_SECONDS = 10.0
SHOWN = 6
"""Points in time of the table."""


@dataclass
class History:
    """Resident memory of one process, in MB, from its first sample on. A worker that is started again has a new history."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """MB by which the mean of the last quarter exceeds that of the second. The first one loads and warms up."""
        quarter = len(self.sizes) // 4
        if not quarter:
            return 0.0
        second, last = self.sizes[quarter : 2 * quarter], self.sizes[-quarter:]
        return sum(last) / quarter - sum(second) / quarter


class MemoryLog:
    """Samples the processes that `pids` names, on a thread, inside `with`."""

    def __init__(self, pids: Callable[[], dict[str, int]], seconds: float = SAMPLE_SECONDS) -> None:
        self.histories: dict[int, History] = {}
        self._pids, self._seconds, self._began = pids, seconds, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "MemoryLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> None:
        for name, pid in self._pids().items():
            with suppress(psutil.Error):
                size = psutil.Process(pid).memory_info().rss / 1e6
                history = self.histories.setdefault(pid, History(name, pid))
                history.times.append(time.monotonic() - self._began)
                history.sizes.append(size)

    def table(self) -> list[str]:
        """A line for each process that lived long enough to be sampled four times: its size at six times, and its growth."""
        lines = ["| process | lived | resident memory, MB | growth, MB |", "|---|---|---|---|"]
        for one in sorted(self.histories.values(), key=lambda one: (one.name, one.times[0])):
            if len(one.sizes) < 4:
                continue
            shown = [one.sizes[round(i * (len(one.sizes) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
            sizes = " ".join(f"{size:.0f}" for size in shown)
            lines.append(f"| {one.name} | {one.times[0]:.0f} to {one.times[-1]:.0f} s | {sizes} | {one.growth:+.0f} |")
        return lines

    def _run(self) -> None:
        self.sample()
        while not self._stop.wait(self._seconds):
            self.sample()
