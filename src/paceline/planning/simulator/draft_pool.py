"""Draft workers in the simulation: the production pairing decides which of them drafts for a sequence."""

from collections import Counter, defaultdict
from math import ceil

from paceline.planning import WorkerProfile
from paceline.planning.simulator.job import SimulatedRequest
from paceline.policy.pairing.pairing import DraftView, Pairing

FAR = 1.05
"""Round trip to a draft worker that is not the nearest, relative to the nearest."""
USUAL_DEPTH = 4
"""Draft steps of a round by which a target judges the queue at a draft worker."""
LOAD_STEP = 8
"""Number of sequences at a draft worker above which their count is rounded up to a multiple of it."""


class DraftWorkers:
    """The sequences at each draft worker, and the time that it has drafted. A lost worker is not usable."""

    def __init__(self, profile: WorkerProfile) -> None:
        self._seconds = profile.draft_seconds
        self._prefill = profile.draft_prefill_seconds.value
        self._round_trip = profile.round_trip_seconds.value
        self._sequences: dict[int, dict[int, SimulatedRequest]] = {}
        """Open sequences by worker and id."""
        self._known: dict[int, float] = {}
        self.busy_seconds: defaultdict[int, float] = defaultdict(float)
        self.network_factor = 1.0

    @property
    def usable(self) -> list[int]:
        return list(self._sequences)

    def add(self, worker: int) -> None:
        self._sequences[worker] = {}

    def remove(self, worker: int) -> list[SimulatedRequest]:
        """The sequences that the worker drafted for."""
        return list(self._sequences.pop(worker, {}).values())

    def open(self, worker: int, job: SimulatedRequest) -> None:
        self._sequences[worker][job.id] = job
        self.busy_seconds[worker] += self._prefill * job.length

    def close(self, worker: int, job: SimulatedRequest) -> None:
        self._sequences.get(worker, {}).pop(job.id, None)

    def load(self, worker: int) -> int:
        return len(self._sequences.get(worker, ()))

    def step_seconds(self, sequences: int) -> float:
        found = self._known.get(sequences)
        if found is None:
            found = self._known[sequences] = self._seconds.at(max(1, sequences))
        return found

    def views(self, target: int) -> list[DraftView]:
        """The workers as the target sees them. The nearest one is the target's number modulo their count."""
        workers = self.usable
        nearest = workers[target % len(workers)] if workers else -1
        trip = self._round_trip * self.network_factor
        return [
            DraftView(
                f"draft-{worker:05d}",
                trip if worker == nearest else FAR * trip,
                USUAL_DEPTH * self.step_seconds(len(sequences)) if sequences else 0.0,
                is_usable=True,
            )
            for worker, sequences in self._sequences.items()
        ]


class PooledDrafts:
    """The drafts of one target worker from a pool; the draft workers compute the prompts of the draft model."""

    def __init__(self, pool: DraftWorkers, target: int) -> None:
        self._pool, self._target = pool, target
        self._pairing = Pairing()
        self._count: Counter[int] = Counter()
        """Own sequences by draft worker."""
        self._undrafted: dict[int, SimulatedRequest] = {}
        """Sequences without a draft worker."""

    def open(self, job: SimulatedRequest, now: float) -> None:
        name = self._pairing.choose(self._pool.views(self._target), now)
        if name is None:
            self._undrafted[job.id] = job
            return
        job.drafter = int(name.removeprefix("draft-"))
        self._pool.open(job.drafter, job)
        self._count[job.drafter] += 1

    def close(self, job: SimulatedRequest) -> None:
        self._undrafted.pop(job.id, None)
        if job.drafter >= 0:
            self._pool.close(job.drafter, job)
            self._leave(job)

    def lost(self, job: SimulatedRequest) -> None:
        """The draft worker of the sequence is gone."""
        self._leave(job)
        self._undrafted[job.id] = job

    def reopen(self, now: float) -> bool:
        """Open the sequences that have no draft worker elsewhere. Whether there were any."""
        waiting, self._undrafted = self._undrafted, {}
        for job in waiting.values():
            self.open(job, now)
        return bool(waiting)

    def row_seconds(self, depth: int) -> float:
        return 0.0

    def load(self, batch: int) -> int:
        """Sequences at the fullest of its draft workers, rounded up; 0 if a sequence has none."""
        if not self._count or self._undrafted:
            return 0
        most = max(self._pool.load(worker) for worker in self._count)
        return most if most <= LOAD_STEP else LOAD_STEP * ceil(most / LOAD_STEP)

    def ran(self, steps: int, depth: int) -> None:
        """Adds the draft steps to the time of the draft workers. Targets that share a worker share its steps."""
        for worker, own in self._count.items():
            load = max(own, self._pool.load(worker))
            self._pool.busy_seconds[worker] += steps * depth * self._pool.step_seconds(load) * own / load

    def _leave(self, job: SimulatedRequest) -> None:
        self._count[job.drafter] -= 1
        if self._count[job.drafter] <= 0:
            del self._count[job.drafter]
        job.drafter = -1
