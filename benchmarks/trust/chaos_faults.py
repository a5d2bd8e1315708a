"""The faults of `chaos.py`, two at a time: killed and suspended processes, networks, disks, clocks, poison requests."""

import itertools
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos_cluster import GATEWAY, Cluster
from chaos_links import FAIR, Weather

SECONDS = 4.0
"""Length of a fault of a network or a disk."""
WEATHERS = {
    "delay": Weather(delay=0.1),
    "no bytes to the server": Weather(stops_requests=True),
    "no bytes from the server": Weather(stops_answers=True),
    "no bytes": Weather(stops_requests=True, stops_answers=True),
    "cut": Weather(is_cut=True),
}
REPEAT = "repeated connection"
KILLS = (GATEWAY, "target", "draft", "prefill")
Pair = tuple[str, str]
NO_KILLS = 5
"""Times of a pair without a killed process in a round: after others a process must start."""


@dataclass(frozen=True)
class Event:
    """Two faults in the same second. The times are of `time.monotonic`."""

    pair: Pair
    where: str
    start: float
    end: float


class Faults:
    """Makes pairs of faults. One thread calls all methods."""

    def __init__(
        self, seed: int, cluster: Cluster, clock: Path, read_only: Path, poison: Callable[[random.Random], str]
    ) -> None:
        self._rng = random.Random(seed)
        self._cluster, self._clock, self._read_only = cluster, clock, read_only
        self._kinds: dict[str, Callable[[str, random.Random], str]] = {
            **{f"kill {role}": self._kill for role in KILLS if self._names(role)},
            "suspend": self._suspend,
            "network": self._network,
            "disk": self._disk,
            "clock": self._jump,
            "poison": lambda victim, rng: poison(rng),
        }
        self._order: list[Pair] = []

    def keep(self, kinds: Sequence[str]) -> None:
        """Makes faults of these kinds only."""
        self._kinds = {kind: self._kinds[kind] for kind in kinds}

    @property
    def pairs(self) -> list[Pair]:
        """All pairs, also of a fault with itself where there are two victims."""
        twice = [(kind, kind) for kind in ("kill target", "suspend", "network", "disk") if kind in self._kinds]
        return [*itertools.combinations(self._kinds, 2), *twice]

    def make(self) -> Event:
        """Makes the next pair, once its victims are ready. In each round all pairs happen in a random order."""
        if not self._order:
            self._order = [pair for pair in self.pairs for _ in range(1 if _is_kill(pair) else NO_KILLS)]
            self._rng.shuffle(self._order)
        pair, victims = self._order.pop(), list[str]()
        for kind in pair:
            role = kind.removeprefix("kill ") if kind.startswith("kill ") else ""
            names = [name for name in self._names(role) if name not in victims]
            victims.append(self._rng.choice(names))
        self._cluster.wait_ready(victims)
        start, places = time.monotonic(), ["", ""]
        threads = [
            threading.Thread(target=self._make, args=(places, i, pair[i], victims[i], self._rng.random()))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Event(pair, " and ".join(places), start, time.monotonic())

    def _make(self, places: list[str], i: int, kind: str, victim: str, seed: float) -> None:
        rng = random.Random(seed)
        time.sleep(rng.uniform(0.0, 1.0))
        places[i] = self._kinds[kind](victim, rng)

    def _names(self, role: str) -> list[str]:
        """The gateway and the workers of a role, or of all roles."""
        return sorted(name for name in {GATEWAY, *self._cluster.names} if name.startswith(role))

    def _kill(self, victim: str, rng: random.Random) -> str:
        self._signal(victim, signal.SIGKILL)
        return f"kill {victim}"

    def _suspend(self, victim: str, rng: random.Random) -> str:
        """Longer than the silence after which a worker is suspected and, in half of the cases, a gateway is dropped."""
        seconds = rng.choice((3.0, 13.0) if victim == GATEWAY else (1.0, 5.0))
        pid = self._signal(victim, signal.SIGSTOP)
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return f"suspend {victim} for {seconds:g} s"

    def _network(self, victim: str, rng: random.Random) -> str:
        """Separates two processes that are connected, or a client and the gateway."""
        edges = [(link, source) for link in self._cluster.links for source in link.sources]
        if not edges:
            return "no connection"
        link, source = rng.choice(edges)
        kind = rng.choice((*WEATHERS, REPEAT))
        if kind == REPEAT:
            count = link.repeat(source, SECONDS)
            return f"{count} {kind}s of {source} to {link.name}"
        link.set(source, WEATHERS[kind])
        time.sleep(SECONDS)
        link.set(source, FAIR)
        return f"{kind} between {source} and {link.name}"

    def _disk(self, victim: str, rng: random.Random) -> str:
        pid = self._cluster.pids()[victim]
        if rng.random() < 0.5:
            mark = self._read_only / str(pid)
            mark.touch()
            time.sleep(SECONDS)
            mark.unlink()
            return f"read-only disk of {victim}"
        with suppress(ProcessLookupError):  # a limit of 0 bytes for files: every write fails, as on a full disk
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
            time.sleep(SECONDS)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        return f"full disk of {victim}"

    def _jump(self, victim: str, rng: random.Random) -> str:
        offset = rng.choice((-86_400.0, -60.0, 60.0, 86_400.0, 10 * 365 * 86_400.0))
        self._clock.write_text(str(offset))
        time.sleep(1.0)
        return f"clock jump by {offset:g} s"

    def _signal(self, victim: str, number: int) -> int:
        pid = self._cluster.pids()[victim]
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid


def _is_kill(pair: Pair) -> bool:
    return any(kind.startswith("kill ") for kind in pair)
