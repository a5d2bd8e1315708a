"""Clusters that a plan chooses from: how many workers of each role, and where drafts are made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import InvalidRequest
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.config import SimulationConfig, Speculation
from paceline.planning.traces.trace import Trace

Placement = Literal["none", "device", "pool"]
"""No drafts, drafts on the device of the target, or drafts of a pool."""
DRAFTS_PER_TARGET = (0.125, 0.25, 0.5, 1.0)
"""Sizes of a draft pool to try, as a share of the target workers."""


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """The most that a plan may use."""

    workers: int = 64
    """Target and draft workers together."""
    dollars_per_hour: float = math.inf

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.dollars_per_hour >= 0.0:
            raise InvalidRequest(f"limits must be at least 1 worker and 0 dollars, got {self}", field="limits")


@dataclass(frozen=True, slots=True)
class ClusterCandidate:
    targets: int
    drafts: int
    placement: Placement
    dollars_per_hour: float

    def config(self, profile: WorkerProfile, speculation: Speculation | None, seed: int) -> SimulationConfig:
        drafting = None if self.placement == "none" else speculation
        return SimulationConfig(profile, self.targets, self.drafts, drafting, seed=seed)

    @property
    def workers(self) -> str:
        """The workers in words."""
        targets = f"{self.targets} target worker{'s' * (self.targets > 1)}"
        return targets + (f" and {self.drafts} draft worker{'s' * (self.drafts > 1)}" if self.drafts else "")

    def __str__(self) -> str:
        if self.placement == "pool":
            return self.workers
        devices = "its device" if self.targets == 1 else "their devices"
        return (
            f"{self.workers} with drafts on {devices}"
            if self.placement == "device"
            else f"{self.workers} without drafts"
        )


def candidates(
    profile: WorkerProfile, speculation: Speculation | None, limits: ClusterLimits, fewest: int
) -> list[ClusterCandidate]:
    """All clusters of at least `fewest` target workers within the limits, cheapest first, then the smallest."""
    found = [
        ClusterCandidate(targets, drafts, placement, price)
        for targets in range(fewest, limits.workers + 1)
        for drafts, placement in _drafts(targets, speculation is not None)
        if targets + drafts <= limits.workers and (price := _price(profile, targets, drafts)) <= limits.dollars_per_hour
    ]
    return sorted(
        found,
        key=lambda candidate: (
            candidate.dollars_per_hour,
            candidate.targets + candidate.drafts,
            candidate.placement != "none",
        ),
    )


def _drafts(targets: int, speculates: bool) -> Iterator[tuple[int, Placement]]:
    yield 0, "none"
    if speculates:
        yield 0, "device"
        yield from ((count, "pool") for count in sorted({math.ceil(targets * share) for share in DRAFTS_PER_TARGET}))


def _price(profile: WorkerProfile, targets: int, drafts: int) -> float:
    return targets * profile.price_per_hour.value + drafts * profile.draft_price_per_hour.value


MARGIN = 0.5
"""Share of the estimated work that counts for the fewest target workers: prompts and answers share passes."""


def fewest_targets(profile: WorkerProfile, speculation: Speculation | None, trace: Trace) -> int:
    """Target workers below which no cluster is simulated, because its queues would grow through the trace.

    The work is that of full passes without contexts, with every repeated prefix cached, and every draft accepted and free.
    """
    seen: set[tuple[int, int]] = set()
    computed = output = 0
    for request in trace.requests:
        keys = [(request.copy, block) for block in request.blocks]
        hits = sum(key in seen for key in keys)
        seen.update(keys)
        computed += max(1, request.prompt_tokens - hits * trace.block_tokens)
        output += request.output_tokens
    per_row = min(seconds / rows for rows, seconds in (profile.prompt_seconds or profile.pass_seconds).points)
    batch = int(profile.max_num_seqs.value)
    tokens = batch if speculation is None else batch * (speculation.max_depth + 1)
    work = computed * per_row + output * profile.pass_seconds.at(batch) / tokens
    return max(1, math.floor(MARGIN * work / trace.seconds)) if trace.seconds > 0.0 else 1
