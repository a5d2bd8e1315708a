"""The draft prefill of the production policy in the simulation."""

from dataclasses import replace

import pytest

from paceline.planning.profiles.curve import Figure
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.simulation.config import SimulationConfig, Speculation
from paceline.planning.simulation.simulation import simulate
from paceline.planning.simulation.workers.depths import BESIDE_DECODING, PolicyDepths
from paceline.planning.simulation.workers.job import Job
from paceline.planning.simulation.workers.rounds import Rounds
from paceline.planning.simulation.workers.worker import DeviceDrafts
from paceline.planning.traces.trace import Trace, TraceRequest

PROFILE = load_profile("h200-8b")
SPECULATION = Speculation((0.8,), rule="policy")


def job(number: int, has_draft: bool = False, tokens: int = 128) -> Job:
    made = Job(number, 0.0, 300, tokens, ())
    made.generated, made.has_draft = 1, has_draft
    return made


def slow_prefill(seconds: float) -> WorkerProfile:
    return replace(PROFILE, draft_prefill_seconds=Figure(seconds, "assumed"))


def run_steps(policy: PolicyDepths, jobs: list[Job], count: int = 40) -> list[tuple[list[int], float]]:
    """Depths and the waiting time of each step; all drafts are accepted. The first steps are plain: the policy times them."""
    rounds, steps = Rounds(PROFILE, SPECULATION), []
    for _ in range(count):
        depths = policy.decide(jobs)
        step = policy.round_of(depths, rounds, len(jobs))
        policy.observe(jobs, depths, depths, 300 * len(jobs), step, 0, rounds)
        extra = step.waiting - rounds.waiting_seconds(len(jobs), len(jobs), max(depths))
        steps.append((depths, extra))
    return steps


def test_a_sequence_has_one_draft_prefill_before_its_first_draft() -> None:
    steps = run_steps(PolicyDepths(PROFILE, 8), [job(0)])
    costs = [extra for _, extra in steps]
    [prefill] = [number for number, cost in enumerate(costs) if cost > 1e-9]
    assert costs[prefill] == pytest.approx(BESIDE_DECODING * PROFILE.draft_prefill_seconds.value * 301)
    assert all(depths == [0] for depths, _ in steps[: prefill + 1])
    assert any(depths[0] for depths, _ in steps[prefill + 1 :])


@pytest.mark.parametrize(("has_draft", "on_device"), [(True, True), (False, False)])
def test_no_prefill_where_it_is_done_or_a_draft_worker_has_it(has_draft: bool, on_device: bool) -> None:
    steps = run_steps(PolicyDepths(PROFILE, 8, on_device), [job(0, has_draft)])
    assert any(depths[0] for depths, _ in steps)
    assert max(extra for _, extra in steps) == pytest.approx(0.0, abs=1e-9)


def test_the_policy_does_not_draft_where_the_prefill_is_never_recovered() -> None:
    assert not any(depths[0] for depths, _ in run_steps(PolicyDepths(slow_prefill(1e-2), 8), [job(0)]))


def test_prompts_pay_for_the_draft_model_where_they_join_sequences_that_draft() -> None:
    seconds = PROFILE.draft_prefill_seconds.value
    assert [DeviceDrafts(PROFILE, is_policy=True).row_seconds(depth) for depth in (0, 3)] == [0.0, seconds]
    assert [DeviceDrafts(PROFILE, is_policy=False).row_seconds(depth) for depth in (0, 3)] == [seconds, seconds]


def test_a_slow_draft_prefill_costs_time_while_drafting_pays() -> None:
    trace = Trace("t", tuple(TraceRequest(0.0, 300, 128) for _ in range(16)))

    def seconds(profile: WorkerProfile) -> float:
        return simulate(SimulationConfig(profile, speculation=SPECULATION, mode="stepwise", streams=4), trace).seconds

    assert seconds(slow_prefill(0.0)) < seconds(slow_prefill(1e-5)) < seconds(slow_prefill(1e-4))
