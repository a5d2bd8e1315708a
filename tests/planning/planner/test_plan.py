import random
from dataclasses import replace

import pytest

from paceline.core.errors import InvalidRequest
from paceline.planning.planner.sizing import (
    HOURS_PER_MONTH,
    ClusterCandidate,
    ClusterLimits,
    ClusterPlan,
    Placement,
    candidates,
    fewest_targets,
    plan,
)
from paceline.planning.profile import ProfileValue, WorkerProfile, load_profile
from paceline.planning.simulator.result import Objective
from paceline.planning.simulator.settings.config import Speculation
from paceline.planning.traces.trace import Trace
from paceline.planning.traces.trace_files import TrafficPattern, synthesize

H200 = load_profile("h200-8b")
LOAD = synthesize(TrafficPattern(30.0, 800, 200), 20.0)
SHORT = LOAD.first(4.0)
OBJECTIVE = Objective(ttft=0.3, tpot=0.005, share=0.95)
ALPHA = Speculation((0.8,))
LIMITS = ClusterLimits(workers=12)


def prices(target: float, draft: float) -> WorkerProfile:
    return replace(
        H200, price_per_hour=ProfileValue(target, "assumed"), draft_price_per_hour=ProfileValue(draft, "assumed")
    )


def planned(
    trace: Trace = LOAD,
    objective: Objective = OBJECTIVE,
    limits: ClusterLimits = LIMITS,
    profile: WorkerProfile = H200,
    speculation: Speculation | None = ALPHA,
) -> ClusterPlan:
    return plan(profile, trace, objective, limits, speculation)


@pytest.fixture(scope="module")
def usual() -> ClusterPlan:
    return planned()


def cost(one: ClusterPlan) -> float:
    return one.choice.candidate.dollars_per_hour


def test_the_choice_meets_the_objective_and_nothing_cheaper_that_was_tried_does(usual: ClusterPlan) -> None:
    one = usual
    assert one.is_met
    assert one.choice.attainment >= OBJECTIVE.share
    cheaper = [other for other in one.evaluations if other.candidate.dollars_per_hour < cost(one)]
    assert all(other.attainment < OBJECTIVE.share for other in cheaper)


def test_drafts_save_money_under_a_tight_time_per_token(usual: ClusterPlan) -> None:
    one = usual
    assert one.choice.candidate.placement != "none"
    assert one.plain is not None
    assert one.saving_per_month == pytest.approx((one.plain.candidate.dollars_per_hour - cost(one)) * HOURS_PER_MONTH)
    assert one.saving_per_month > 0
    assert any("Drafts save $" in reason for reason in one.reasons)


def test_drafts_that_are_never_accepted_are_not_planned() -> None:
    one = planned(speculation=Speculation((0.0,)))
    assert one.choice.candidate.placement == "none"
    assert "Do not speculate: drafts do not make a cheaper cluster meet the objective." in one.reasons


def test_cost_grows_with_load() -> None:
    costs = [cost(planned(SHORT.scaled(scale))) for scale in (0.5, 1.0, 2.0)]
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


def test_cost_grows_with_a_tighter_objective() -> None:
    for objectives in (
        [Objective(0.3, tpot, 0.95) for tpot in (0.012, 0.006, 0.004)],
        [Objective(ttft, 0.02, 0.95) for ttft in (1.0, 0.2, 0.05)],
        [Objective(0.2, 0.008, share) for share in (0.5, 0.99)],
    ):
        met = [one for objective in objectives if (one := planned(SHORT, objective)).is_met]
        costs = [cost(one) for one in met]
        assert costs == sorted(costs)


def test_cost_grows_with_prices() -> None:
    for profiles in (
        [prices(target, 0.8) for target in (1.0, 2.0, 4.0)],
        [prices(2.69, draft) for draft in (0.1, 0.8, 2.69)],
    ):
        costs = [cost(planned(SHORT, profile=profile)) for profile in profiles]
        assert costs == sorted(costs)


def test_no_plan_is_over_its_limits() -> None:
    dice = random.Random(0)
    for _ in range(12):
        limits = ClusterLimits(dice.randint(1, 6), dice.uniform(2.7, 15.0))
        objective = Objective(dice.uniform(0.02, 1.0), dice.uniform(0.002, 0.02), dice.uniform(0.5, 1.0))
        one = planned(SHORT, objective, limits)
        for tried in one.evaluations:
            assert tried.candidate.targets + tried.candidate.drafts <= limits.workers
            assert tried.candidate.dollars_per_hour <= limits.dollars_per_hour
        assert one.is_met == (one.choice.attainment >= objective.share)


def test_an_objective_that_cannot_be_met_is_reported_with_the_best_cluster() -> None:
    one = planned(SHORT, Objective(ttft=0.001), ClusterLimits(2))
    assert not one.is_met
    assert one.saving_per_month is None
    assert one.choice.attainment == max(other.attainment for other in one.evaluations)
    assert one.reasons[0].startswith("No cluster within the limits meets the objective")


@pytest.mark.parametrize(
    ("targets", "drafts", "placement", "words"),
    [
        (1, 0, "none", "1 target worker without drafts"),
        (1, 0, "device", "1 target worker with drafts on its device"),
        (2, 0, "device", "2 target workers with drafts on their devices"),
        (1, 1, "pool", "1 target worker and 1 draft worker"),
        (4, 2, "pool", "4 target workers and 2 draft workers"),
    ],
)
def test_a_cluster_in_words(targets: int, drafts: int, placement: Placement, words: str) -> None:
    assert str(ClusterCandidate(targets, drafts, placement, 1.0)) == words


def test_a_limit_below_one_worker_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="one target worker costs"):
        planned(limits=ClusterLimits(4, 1.0))


@pytest.mark.parametrize("values", [(0, 1.0), (1, -1.0), (1, float("nan"))])
def test_limits_that_cannot_be_are_refused(values: tuple[int, float]) -> None:
    with pytest.raises(InvalidRequest, match="limits must be"):
        ClusterLimits(*values)


def test_candidates_are_ordered_by_cost_and_include_every_placement() -> None:
    found = candidates(H200, ALPHA, ClusterLimits(8), 2)
    costs = [one.dollars_per_hour for one in found]
    assert costs == sorted(costs)
    assert {one.placement for one in found} == {"none", "device", "pool"}
    assert min(one.targets for one in found) == 2
    assert {one.placement for one in candidates(H200, None, ClusterLimits(8), 1)} == {"none"}


def test_the_lower_bound_is_below_the_plan_and_grows_with_load() -> None:
    bounds = [fewest_targets(H200, None, LOAD.scaled(scale)) for scale in (1.0, 4.0, 16.0)]
    assert bounds == sorted(bounds)
    assert bounds[0] <= planned(speculation=None).choice.candidate.targets
