"""Status of engines, drafts and workers, as they are reported to gateways and shown to operators.

`EngineStatus` is the status of one engine, which a target worker reports to gateways. `DrafterStatus` is a draft worker as a
target sees it, and `DraftStatus` is a draft inside an engine whose weights can be exchanged. `ClusterStatus` lists the workers
of a cluster, as the gateway shows them to operators.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import Enum
from typing import Literal

from paceline.core.pool_config import Role
from paceline.core.request import SpeculationFlags


@dataclass(frozen=True, slots=True)
class GoodputSums:
    """Sums over sequences of the tokens that were committed and the seconds that their steps took."""

    sequences: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    seconds_squared: float = 0.0
    product: float = 0.0
    """Sum of tokens times seconds."""

    @property
    def goodput(self) -> float:
        """Tokens per second of one sequence."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def with_sequence(self, tokens: float, seconds: float) -> "GoodputSums":
        """The sums with one more sequence."""
        return self + GoodputSums(1, tokens, seconds, tokens * tokens, seconds * seconds, tokens * seconds)

    def __add__(self, other: "GoodputSums") -> "GoodputSums":
        return GoodputSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def since(self, before: "GoodputSums") -> "GoodputSums":
        """The sequences after `before`; all if counting started again since."""
        if self.sequences < before.sequences:
            return self
        return GoodputSums(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """A draft worker as one target sees it."""

    name: str
    state: str
    sequences: int
    """Sequences of this target that are open there."""
    queue_seconds: float
    """Drafting time queued there."""
    round_trip: float
    """Recent round trip, seconds."""
    answers: int
    """Rounds it has drafted."""
    hits: int
    """Rounds drafted before they were requested."""
    late: int
    """Rounds whose draft missed the deadline."""
    pass_seconds: float = 0.0
    """Recent time of one pass over its model. 0 if it is not known."""
    paused_share: float | None = None
    """Share of drafts that were ready when it paused drafting ahead for this target. None if it drafts ahead."""
    refusal: str = ""
    """Why the draft does not fit the target, if it does not."""
    goodput: GoodputSums = GoodputSums()
    """Sequences of this target that it drafted for, since the connection was made."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What one of the two drafts of a trial inside an engine was measured on."""

    sequences: int = 0
    periods: int = 0
    goodput: float = 0.0
    """Tokens per second of one sequence. 0 if it was not measured."""


@dataclass(frozen=True, slots=True)
class DraftSwapStatus:
    """The last swap of the draft inside an engine."""

    number: int
    """Number that the gateway gave the swap."""
    candidate: str
    """The new draft, as it was named."""
    verdict: str
    """`continue` while the new draft loads or is tried, then `keep` or `roll back`; see `policy/pairing/draft_trial.py`."""
    reason: str
    gain: float | None = None
    """Relative gain in goodput, 0.1 for 10% more. None if it is not known."""
    of_current: DraftCounts = DraftCounts()
    of_candidate: DraftCounts = DraftCounts()


@dataclass(frozen=True, slots=True)
class DraftStatus:
    """The draft inside an engine whose weights can be exchanged."""

    draft: str
    """Name or folder of the draft in use. Until a new draft is kept, it is the old draft."""
    method: str
    swap: DraftSwapStatus | None = None
    """The last swap. None if there was no swap since the start."""


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """The last change of the weights of an engine."""

    number: int
    source: str
    """Folder, name or address of the new weights."""
    state: Literal["loading", "waiting", "done", "failed"]
    """`waiting`: for requests that run."""
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A figure that is over its limit, and the remedy."""

    name: str
    figure: float
    limit: float
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.figure:.4g} against {self.limit:.4g}; {self.remedy}"


class BreakerState(Enum):
    """State of the circuit breaker of one traffic class."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(frozen=True, slots=True)
class TrafficStatus:
    """Speculation of one traffic class: a method and a category."""

    method: str
    category: str
    breaker: BreakerState
    alphas: tuple[float, ...]
    """Conditional acceptance by position over recent rounds."""
    mean_depth: float
    """Mean of recent depth decisions, including 0."""
    fallbacks: Mapping[str, int]
    """Sequence-steps decoded plainly although speculation was on, by reason; see `engine/traffic.py`."""
    drafted: int = 0
    """Drafted tokens since the start."""
    accepted: int = 0
    """Drafted tokens that verification accepted since the start."""
    tested: int = 0
    """Drafted tokens that were decided: all accepted ones and the first rejected one of each round. accepted / tested is alpha
    over all positions."""
    drifts: int = 0
    """Changes of acceptance; see `policy/depth/drift.py`."""
    drift: tuple[float, float] | None = None
    """Acceptance of first drafts before and after the last change."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A text that plain decoding would not have generated. It has no tokens: those are in the worker's log."""

    request_id: str
    choice: int
    num_tokens: int
    num_wrong: int
    first: int
    """Index of the first wrong output token."""
    where: str
    """The step that committed it."""


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """Results of the engine's own check of its outputs."""

    audited: int = 0
    """Output tokens computed again by plain decoding."""
    drifted: int = 0
    """Audited tokens that plain decoding would not have generated, beyond rounding."""
    dropped: int = 0
    """Sequences selected for the check and never checked, for lack of time or of cache blocks."""
    texts: int = 0
    """Sequences checked."""
    busy_passes: int = 0
    """Passes of the check between steps that served requests."""
    busy_steps: int = 0
    """Those steps."""
    findings: tuple[AuditFinding, ...] = ()
    """The newest texts with wrong tokens."""

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        if not self.drifted:
            return ()
        remedy = (
            "outputs differ from plain decoding: turn speculation off, keep the log, which names requests and tokens, and "
            "run `paceline audit`"
        )
        return (Symptom("audit_drift", self.drifted, 0.0, remedy),)


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Cache tiers below the device: blocks held now, and counts since the start."""

    host_blocks: int = 0
    disk_blocks: int = 0
    device_hits: int = 0
    """Tokens of scheduled sequences found in the tier."""
    host_hits: int = 0
    disk_hits: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0
    bytes_to_disk: int = 0
    bytes_from_disk: int = 0
    bad_blocks: int = 0
    """Blocks on disk with a wrong checksum; they were computed again."""
    dropped_blocks: int = 0
    """Blocks that were discarded: no free slot, or the write to disk failed."""


@dataclass(frozen=True, slots=True)
class HandoffCounts:
    """Prompts that prefill workers or peers computed: received by a target, or sent by a prefill worker, since its start."""

    done: int = 0
    failed: int = 0
    """Hand-offs that failed; the target computed the prompt itself."""
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    """Total time from the request to the last byte, over the hand-offs that are done."""
    peer_tokens: int = 0
    """Tokens, of `tokens`, that came from the cache of another target."""
    in_place_bytes: int = 0
    """Bytes, of `bytes`, that the target copied from the other worker's device memory."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Status of one engine. A target worker reports it to gateways, with the parts that only a cluster has."""

    running: int
    """Sequences in the batch."""
    waiting: int
    kv_used: int
    """Blocks held by sequences. Blocks that only the prefix cache refers to count as free."""
    kv_total: int
    preemptions: int
    invalid_drafts: int
    flags: SpeculationFlags
    """Flags in effect; no field is None."""
    traffic: tuple[TrafficStatus, ...]
    advantage: float | None = None
    """Expected speed of speculation over plain decoding at the last decision. None if the depth rule does not estimate it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time of steps since the start, by part; see `engine/traffic.py`."""
    executor_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps since the start, by `graph` or by the reason why the host executor ran them; see `engine/step/step.py`."""
    audit: AuditCounts = AuditCounts()
    tiers: TierCounts | None = None
    """Counts of the cache tiers. None if the device is the only tier."""
    drafters: tuple[DrafterStatus, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    handoffs: HandoffCounts | None = None
    """Counts of hand-offs. None if this worker takes part in no hand-offs."""
    generated: int = 0
    """Tokens committed since the start, for all gateways."""
    draft: DraftStatus | None = None
    """The draft inside the engine. None if the engine drafts with no model of its own."""
    weights: WeightsStatus | None = None
    """The last change of its weights. None if there was none."""


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
    drafted: int = 0
    """Target: tokens drafted for clients since its start."""
    accepted: int = 0
    """Target: tokens, of `drafted`, that verification accepted."""
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
