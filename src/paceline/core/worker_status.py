"""A cluster and its workers, as operators see them."""

from dataclasses import dataclass

from paceline.core.cluster_config import Role


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something is wrong, by which figure, and what is done about it."""

    name: str
    figure: float
    limit: float
    remedy: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    name: str
    pool: str
    role: Role
    state: str
    """`starting`, `ready`, `suspected`, `unhealthy`; of a draft worker, as the targets see it."""
    address: str
    running: int = 0
    """Sequences with a seat."""
    waiting: int = 0
    kv_use: float | None = None
    """Used share of the cache, 0 to 1."""
    depth: float | None = None
    """Of a target: recent mean depth."""
    alpha: float | None = None
    """Of a target: recent acceptance per position, averaged over positions and kinds of traffic."""
    queue_seconds: float | None = None
    """Of a draft worker: drafting that waits there."""
    round_trip: float | None = None
    """Seconds: from the gateway to a target, from the targets to a draft worker."""
    answers: int = 0
    """Of a draft worker: rounds it has drafted for."""
    hits: int = 0
    """Of them, drafted before they were asked for."""
    late: int = 0
    """Of them, too late to be used."""
    symptoms: tuple[Symptom, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    workers: tuple[WorkerStatus, ...]
    continued: int
    """Streams that went on at another worker than they began with."""
