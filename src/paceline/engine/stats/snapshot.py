"""What an engine is doing, for whoever watches it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import Symptom
from paceline.speculation.depth.breaker import BreakerState


@dataclass(frozen=True, slots=True)
class TrafficReport:
    """One class of traffic: a method and a category."""

    method: str
    category: str
    breaker: BreakerState
    alphas: tuple[float, ...]
    """Conditional acceptance by position over recent rounds, as far as drafts were tested."""
    mean_depth: float
    """Of recent decisions, those for 0 included."""
    fallbacks: Mapping[str, int]
    """Sequence-steps decoded plainly although speculation was on, by reason; see `engine/stats/tally.py`."""
    tested: int = 0
    """Drafts whose fate is known, since the start: all accepted ones and the first rejected of each round."""
    kept: int = 0
    """Of them, accepted: kept / tested is alpha over all positions."""
    drifts: int = 0
    """Changes of acceptance found; see `speculation/depth/drift.py`."""
    drift: tuple[float, float] | None = None
    """Acceptance of first drafts before and after the last one."""


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """What the engine found when it checked its own texts."""

    audited: int = 0
    """Output tokens computed again by plain decoding."""
    drifted: int = 0
    """Of them, those that plain decoding would not have said, beyond rounding."""
    dropped: int = 0
    """Texts that were to be checked and found no idle moment."""

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        if not self.drifted:
            return ()
        remedy = (
            "texts were not those of plain decoding: turn speculation off, keep the log, which names requests and tokens, and "
            "run `paceline audit`"
        )
        return (Symptom("audit_drift", self.drifted, 0.0, remedy),)


@dataclass(frozen=True, slots=True)
class TierReport:
    """The tiers of the cache: what is in those below the device, and counts since the start."""

    host_blocks: int = 0
    disk_blocks: int = 0
    device_hits: int = 0
    """Tokens of scheduled sequences that were found there and not computed."""
    host_hits: int = 0
    disk_hits: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0
    bytes_to_disk: int = 0
    bytes_from_disk: int = 0
    bad_blocks: int = 0
    """Blocks on disk that were not what they should be; they were computed again."""
    dropped_blocks: int = 0
    """Blocks that had to be forgotten: no slot to spare, or the disk did not take them."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    running: int
    """Sequences with a seat."""
    waiting: int
    kv_used: int
    """Blocks held by sequences; what only the prefix cache remembers is free."""
    kv_total: int
    preemptions: int
    invalid_drafts: int
    flags: SpeculationFlags
    """As in effect: no field is None."""
    traffic: tuple[TrafficReport, ...]
    advantage: float | None = None
    """Speed expected of speculation over plain decoding at the last decision; None: the depth rule does not know."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of steps since the start, by part; see `engine/stats/step_totals.py`."""
    audit: AuditCounts = AuditCounts()
    tiers: TierReport | None = None
    """None where the device is the only tier."""
