"""What a target worker says about itself when a gateway asks: one `Report`, and the records it is made of."""

import msgspec

from paceline.runtime.wire.messages import Count, Large, Message, Name, Record, Share, Words


class HandoffRecord(Record, frozen=True):
    """Prompts that a target was handed, or a prefill worker gave, since it started."""

    done: Large = 0
    failed: Large = 0
    tokens: Large = 0
    bytes: Large = 0
    seconds: Share = 0.0
    """From being asked for to being there, of those that are done."""
    peer_tokens: Large = 0
    """Of `tokens`, those that another target had cached."""


class TrafficRecord(Record, frozen=True):
    """One class of traffic; see `TrafficReport`."""

    method: Name
    category: Name
    breaker: Name
    alphas: list[float]
    mean_depth: float
    fallbacks: dict[Name, Large]
    tested: Large = 0
    kept: Large = 0
    drifts: Large = 0
    drift: tuple[float, float] | None = None


class DrafterRecord(Record, frozen=True):
    """How a draft worker looks from this target."""

    name: Name
    state: Name
    sequences: Count
    """Of this target, open there."""
    queue_seconds: Share
    """Drafting that waits there."""
    round_trip: Share
    """Seconds, of late."""
    answers: Large
    hits: Large
    """Answers that had been drafted before they were asked for."""
    late: Large
    pass_seconds: Share = 0.0
    """Of one pass over its model, of late; 0: not known."""
    resting: Share | None = None
    """It has stopped drafting ahead for this target: the share of drafts that were ready. None: it drafts ahead."""


class SymptomRecord(Record, frozen=True):
    """Something is wrong, by which figure, and what is done about it."""

    name: Name
    figure: float
    limit: float
    remedy: Words


class AuditRecord(Record, frozen=True):
    """See `AuditCounts`."""

    audited: Large = 0
    drifted: Large = 0
    dropped: Large = 0


class Report(Message, frozen=True, tag=44):
    epoch: Large
    name: Name
    running: Count
    waiting: Count
    kv_used: Count
    kv_total: Count
    preemptions: Large
    invalid_drafts: Large
    enabled: bool
    method: Name
    max_depth: Count
    traffic: list[TrafficRecord]
    drafters: list[DrafterRecord]
    symptoms: list[SymptomRecord]
    handoffs: HandoffRecord | None = None
    """None: no prompts are handed over here."""
    audit: AuditRecord = AuditRecord()
    advantage: float | None = None
    """See `EngineSnapshot`."""
    seconds: dict[Name, Share] = msgspec.field(default_factory=dict)
    tiers: dict[Name, Large] | None = None
    """The fields of `TierReport`; None where the device is the only tier."""
