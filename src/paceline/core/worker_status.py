"""A cluster and its workers, as operators see them."""

from dataclasses import dataclass

from paceline.core.pool_config import Role


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something is wrong, by which figure, and what is done about it."""

    name: str
    figure: float
    limit: float
    remedy: str


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """Prompts that a target was handed by prefill workers, or a prefill worker gave, since it started."""

    done: int
    failed: int
    """Computed by the target after all."""
    tokens: int
    bytes: int
    seconds: float
    """From being asked for to being there, of those that are done."""
    peer_tokens: int = 0
    """Of `tokens`, those that another target had cached."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    name: str
    pool: str
    role: Role
    state: str
    """`starting`, `loading 12/30 layers from 2 peers`, `ready`, `suspected`, `unhealthy`; of a draft worker, as the targets see
    it."""
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
    """Of a draft worker: drafting that waits there. Of a target: prefill, as the router expects."""
    round_trip: float | None = None
    """Seconds: from the gateway to a target, from the targets to a draft worker."""
    answers: int = 0
    """Of a draft worker: rounds it has drafted for."""
    hits: int = 0
    """Of them, drafted before they were asked for."""
    late: int = 0
    """Of them, too late to be used."""
    symptoms: tuple[Symptom, ...] = ()
    preemptions: int = 0
    """Of a target: sequences that lost their seat for lack of cache blocks."""
    tokens: int = 0
    """Of a target: what it generated for this gateway."""
    pass_seconds: float | None = None
    """Of a draft worker: one pass over its model, of late."""
    resting: float | None = None
    """Of a draft worker that has stopped drafting ahead: the share of drafts that were ready. None: it drafts ahead."""
    prompt_tokens: int = 0
    """Of a target: in the requests of this gateway that it began to answer."""
    cached_tokens: int = 0
    """Of those, what its cache supplied."""
    indexed_blocks: int | None = None
    """Of a target: what the router knows its cache to hold; None: the router does not ask."""
    prefill_seconds: float | None = None
    """Of a target: to compute a token of a prompt, as the router measured; None: it does not."""
    handoffs: HandoffCounts | None = None
    """None where prompts are not handed over."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    workers: tuple[WorkerStatus, ...]
    continued: int
    """Streams that went on at another worker than they began with."""
