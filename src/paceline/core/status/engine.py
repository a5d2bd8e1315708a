"""Status of one engine, which a target worker reports to gateways."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from paceline.core.speculation import SpeculationFlags
from paceline.core.status.draft import DrafterStatus, DraftStatus


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
    """Sequence-steps decoded plainly although speculation was on, by reason; see `engine/stats.py`."""
    tested: int = 0
    """Drafted tokens that were decided since the start: all accepted ones and the first rejected one of each round."""
    kept: int = 0
    """Accepted tokens; kept / tested is alpha over all positions."""
    drifts: int = 0
    """Changes of acceptance; see `speculation/depth/drift.py`."""
    drift: tuple[float, float] | None = None
    """Acceptance of first drafts before and after the last change."""


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """Results of the engine's own check of its outputs."""

    audited: int = 0
    """Output tokens computed again by plain decoding."""
    drifted: int = 0
    """Audited tokens that plain decoding would not have generated, beyond rounding."""
    dropped: int = 0
    """Sequences selected for the check and never checked, for lack of idle time."""

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
    """Time of steps since the start, by part; see `engine/stats.py`."""
    executor_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps since the start, by `graph` or by the reason why the host executor ran them; see `engine/executors/reason.py`."""
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
