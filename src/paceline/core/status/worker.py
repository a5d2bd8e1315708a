"""Status of the workers of a cluster, as the gateway shows them to operators."""

from dataclasses import dataclass

from paceline.core.pool_config import Role
from paceline.core.status.engine import HandoffCounts, Symptom


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """Starts and exits of a worker's process, as its supervisor counts them."""

    restarts: int = 0
    started: float | None = None
    """Time of the last start in seconds since 1970. None if no supervisor reports it."""
    last_exit: str = ""
    """Why its last process exited, such as `SIGKILL`. It is empty if no process has exited."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker of a cluster as the gateway sees it: a row of `paceline status`, the metrics and the dashboard."""

    name: str
    pool: str
    role: Role
    state: str
    """`joining`, `loading 12/30 layers from 2 peers`, `warming up`, `ready`, `suspected`, `unhealthy`, `refused`, `draining` or
    `gone`; that of a draft worker is as the targets report it."""
    address: str
    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    kv_use: float | None = None
    """Used share of the KV cache, 0 to 1."""
    depth: float | None = None
    """Target: recent mean depth."""
    alpha: float | None = None
    """Target: recent acceptance per position, averaged over positions and traffic classes."""
    queue_seconds: float | None = None
    """Draft worker: drafting time queued there. Target: prefill time queued there, as the router estimates."""
    round_trip: float | None = None
    """Seconds: gateway to target, or targets to draft worker."""
    answers: int = 0
    """Draft worker: rounds it has drafted."""
    hits: int = 0
    """Draft worker: rounds drafted before they were requested."""
    late: int = 0
    """Draft worker: rounds whose draft missed the deadline."""
    symptoms: tuple[Symptom, ...] = ()
    preemptions: int = 0
    """Target: sequences preempted for lack of cache blocks."""
    tokens: int = 0
    """Target: tokens generated for this gateway."""
    pass_seconds: float | None = None
    """Draft worker: recent time of one pass over its model."""
    paused_share: float | None = None
    """Draft worker: share of drafts that were ready when it paused drafting ahead. None if it drafts ahead."""
    prompt_tokens: int = 0
    """Target: prompt tokens of this gateway's requests that it has started."""
    cached_tokens: int = 0
    """Target: tokens, of `prompt_tokens`, found in its prefix cache."""
    indexed_blocks: int | None = None
    """Target: cached blocks in the router's index. None if the router keeps no index."""
    prefill_seconds: float | None = None
    """Target: seconds per prompt token, as the router measured. None if it was not measured."""
    handoffs: HandoffCounts | None = None
    """Counts of hand-offs. None if this worker takes part in no hand-offs."""
    refusal: str = ""
    """Draft worker: why no target uses it, if its draft fits none."""
    life: WorkerLife = WorkerLife()
    generated: int = 0
    """Target: tokens committed since its start, for all gateways."""
    price: float | None = None
    """Dollars per hour. None if its pool has no price."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    workers: tuple[WorkerStatus, ...]
    continued: int
    """Streams continued on another worker."""
