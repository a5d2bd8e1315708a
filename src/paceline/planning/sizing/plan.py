"""The plan: the cheapest cluster that meets an objective within limits, with the reason. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.config import Speculation
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import SimulationReport, summarize
from paceline.planning.simulation.simulation import simulate
from paceline.planning.sizing.candidate import ClusterCandidate, ClusterLimits, candidates, fewest_targets
from paceline.planning.traces.trace import Trace

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
