"""The plan of a cluster: the cheapest one that meets an objective within limits, with the reason. The functions are pure.

A `ClusterCandidate` says how many workers of each role there are, and where drafts are made. `plan` chooses one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.core.errors import InvalidRequest
from paceline.planning import WorkerProfile
from paceline.planning.simulator import Objective, SimulationReport, simulate, summarize
from paceline.planning.simulator.settings import SimulationConfig, Speculation
from paceline.planning.traces import Trace

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


HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    candidate: ClusterCandidate
    report: SimulationReport

    @property
    def attainment(self) -> float:
        return self.report.attainment


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    choice: Evaluation
    is_met: bool
    """Whether the choice meets the objective; if not, no cluster within the limits does."""
    plain: Evaluation | None
    """The cheapest cluster without drafts that meets the objective. None if there is none within the limits."""
    reasons: tuple[str, ...]
    evaluations: tuple[Evaluation, ...]
    """All simulated clusters, in the order of their simulation."""

    @property
    def saving_per_month(self) -> float | None:
        """Dollars that drafts save; None without a plan to compare."""
        if self.plain is None or not self.is_met:
            return None
        return (self.plain.candidate.dollars_per_hour - self.choice.candidate.dollars_per_hour) * HOURS_PER_MONTH


def plan(
    profile: WorkerProfile,
    trace: Trace,
    objective: Objective,
    limits: ClusterLimits,
    speculation: Speculation | None = None,
    seed: int = 0,
    progress: Callable[[ClusterCandidate], None] = lambda _: None,
) -> ClusterPlan:
    """Simulates clusters from the cheapest on; the first that meets the objective is the choice.

    The choice is never over the limits. If no cluster within them meets the objective, it is the one with the highest
    attainment, and of those the cheapest.
    """
    offered = candidates(profile, speculation, limits, fewest_targets(profile, speculation, trace))
    if not offered:
        offered = candidates(profile, speculation, limits, 1)
    if not offered:
        raise InvalidRequest(
            f"no cluster costs ${limits.dollars_per_hour:g} an hour or less: "
            f"one target worker costs ${profile.price_per_hour.value:g}. Raise the limit",
            field="limits",
        )
    known: dict[ClusterCandidate, Evaluation] = {}

    def evaluate(candidate: ClusterCandidate) -> Evaluation:
        if candidate not in known:
            progress(candidate)
            report = summarize(simulate(candidate.config(profile, speculation, seed), trace), objective)
            known[candidate] = Evaluation(candidate, report)
        return known[candidate]

    def cheapest(some: Sequence[ClusterCandidate]) -> Evaluation | None:
        return next((found for candidate in some if (found := evaluate(candidate)).attainment >= objective.share), None)

    choice = cheapest(offered)
    plain = (
        cheapest([candidate for candidate in offered if candidate.placement == "none"]) if choice is not None else None
    )
    is_met = choice is not None
    if choice is None:
        choice = max(
            known.values(), key=lambda evaluation: (evaluation.attainment, -evaluation.candidate.dollars_per_hour)
        )
    reasons = _reasons(choice, plain, is_met, tuple(known.values()), objective, speculation)
    return ClusterPlan(choice, is_met, plain, reasons, tuple(known.values()))


def _reasons(
    choice: Evaluation,
    plain: Evaluation | None,
    is_met: bool,
    evaluations: Sequence[Evaluation],
    objective: Objective,
    speculation: Speculation | None,
) -> tuple[str, ...]:
    reached = f"{choice.candidate}: {choice.attainment:.2%} of requests meet the objective"
    if not is_met:
        return (
            f"No cluster within the limits meets the objective for {objective.share:.0%} of the requests.",
            f"The best of {len(evaluations)} is {reached}. Raise the limits, or relax the objective.",
        )
    found = [f"{reached}, at ${choice.candidate.dollars_per_hour:.2f} an hour."]
    cheaper = [
        evaluation
        for evaluation in evaluations
        if evaluation.candidate.dollars_per_hour < choice.candidate.dollars_per_hour
    ]
    if cheaper:
        best = max(cheaper, key=lambda evaluation: evaluation.attainment)
        found.append(f"No cheaper cluster meets it: the best, {best.candidate}, reaches {best.attainment:.2%}.")
    if speculation is None:
        return tuple(found)
    if choice.candidate.placement == "none":
        found.append("Do not speculate: drafts do not make a cheaper cluster meet the objective.")
    elif plain is None:
        found.append("No cluster without drafts within the limits meets the objective.")
    else:
        saving = (plain.candidate.dollars_per_hour - choice.candidate.dollars_per_hour) * HOURS_PER_MONTH
        found.append(
            f"Drafts save ${saving:,.0f} a month: the cheapest cluster without them, {plain.candidate.workers}, costs "
            f"${plain.candidate.dollars_per_hour:.2f} an hour."
            if saving > 0.0 and math.isfinite(saving)
            else f"Drafts cost nothing here: the cheapest cluster without them, {plain.candidate.workers}, costs the same."
        )
    return tuple(found)
