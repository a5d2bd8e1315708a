"""Where drafts are cheapest: nowhere, on the device of the target, or in a pool that several targets share. Pure."""

from dataclasses import dataclass

from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.config import Speculation
from paceline.planning.simulation.workers.rounds import Rounds
from paceline.planning.sizing.candidate import Placement

TARGETS_PER_DRAFT = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class DraftPlacement:
    placement: Placement
    targets_per_draft: int
    """Targets that share a draft worker; 0 without a pool."""
    cost: float
    """Dollars per token, relative to plain decoding."""


def placements(profile: WorkerProfile, speculation: Speculation, batch: int, context: float) -> list[DraftPlacement]:
    """All placements for targets with `batch` sequences and `context` tokens each, in a steady state; the cheapest first."""
    reading = profile.context_seconds.value * context
    plain = batch / profile.verify_seconds(batch, 0, context)
    ratio = profile.draft_price_per_hour.value / profile.price_per_hour.value if profile.price_per_hour.value else 1.0

    def rate(rounds: Rounds, drafting: int) -> float:
        best = rounds.best(batch, context, drafting)
        return batch * best.tokens / (best.seconds + reading)

    found = [
        DraftPlacement("none", 0, 1.0),
        DraftPlacement("device", 0, plain / rate(Rounds(profile, speculation), batch)),
    ]
    remote = Rounds(profile, speculation, profile.round_trip_seconds.value)
    found += [
        DraftPlacement("pool", share, (1.0 + ratio / share) * plain / rate(remote, batch * share))
        for share in TARGETS_PER_DRAFT
    ]
    return sorted(found, key=lambda placement: placement.cost)
