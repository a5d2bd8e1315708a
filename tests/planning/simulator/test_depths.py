"""The draft prefill of the production policy in the simulation."""

import random
from dataclasses import replace
from statistics import fmean

import pytest

from paceline.planning.profile import ProfileValue, WorkerProfile, load_profile
from paceline.planning.simulator.batches import SteppedBatch, num_accepted
from paceline.planning.simulator.depths import PolicyDepths
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.prefix_cache import NO_PROMPT
from paceline.planning.simulator.rounds import Rounds
from paceline.planning.simulator.settings.config import SimulationConfig, Speculation
from paceline.planning.simulator.simulation import simulate
from paceline.planning.simulator.worker import DeviceDrafts
from paceline.planning.traces.trace import Trace, TraceRequest
from paceline.policy.depth.prompt_load import MANY_ROWS
from paceline.policy.step import DRAFT_PREFILL_SLOWDOWN

PROFILE = load_profile("h200-8b")
SPECULATION = Speculation((0.8,), rule="policy")


def job(number: int, has_draft: bool = False, tokens: int = 128) -> SimulatedRequest:
    made = SimulatedRequest(number, 0.0, 300, tokens, NO_PROMPT)
    made.generated, made.has_draft = 1, has_draft
    return made


def slow_prefill(seconds: float) -> WorkerProfile:
    return replace(PROFILE, draft_prefill_seconds=ProfileValue(seconds, "assumed"))


def run_steps(policy: PolicyDepths, jobs: list[SimulatedRequest], count: int = 40) -> list[tuple[list[int], float]]:
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
    assert costs[prefill] == pytest.approx(DRAFT_PREFILL_SLOWDOWN * PROFILE.draft_prefill_seconds.value * 301)
    assert all(depths == [0] for depths, _ in steps[: prefill + 1])
    assert any(depths[0] for depths, _ in steps[prefill + 1 :])


@pytest.mark.parametrize(("has_draft", "on_device"), [(True, True), (False, False)])
def test_no_prefill_where_it_is_done_or_a_draft_worker_has_it(has_draft: bool, on_device: bool) -> None:
    steps = run_steps(PolicyDepths(PROFILE, 8, on_device), [job(0, has_draft)])
    assert any(depths[0] for depths, _ in steps)
    assert max(extra for _, extra in steps) == pytest.approx(0.0, abs=1e-9)


def test_the_policy_does_not_draft_where_the_prefill_is_never_recovered() -> None:
    assert not any(depths[0] for depths, _ in run_steps(PolicyDepths(slow_prefill(1e-2), 8), [job(0)]))


def test_a_batch_that_drafts_decodes_plainly_beside_many_prompt_rows() -> None:
    batch, drafted = SteppedBatch(Rounds(PROFILE, SPECULATION), random.Random(0), PolicyDepths(PROFILE, 8)), []
    for number in range(24):
        batch.add(job(number, tokens=2000), Rounds(PROFILE, SPECULATION).at_depth(1, 0, 0))
    for number in range(60):
        prompt_rows = MANY_ROWS if number == 50 else 0
        step = batch.decide(24, prompt_rows)
        batch.advance(1, step, prompt_rows)
        drafted.append(step.depth > 0)
    assert all(drafted[45:50])
    assert not drafted[50]
    assert drafted[51]


def test_prompts_pay_for_the_draft_model_where_they_join_sequences_that_draft() -> None:
    seconds = PROFILE.draft_prefill_seconds.value
    assert [DeviceDrafts(PROFILE, is_policy=True).row_seconds(depth) for depth in (0, 3)] == [0.0, seconds]
    assert [DeviceDrafts(PROFILE, is_policy=False).row_seconds(depth) for depth in (0, 3)] == [seconds, seconds]


def test_a_slow_draft_prefill_costs_time_while_drafting_pays() -> None:
    trace = Trace("t", tuple(TraceRequest(0.0, 300, 128) for _ in range(16)))

    def seconds(profile: WorkerProfile) -> float:
        return simulate(SimulationConfig(profile, speculation=SPECULATION, mode="stepwise", streams=4), trace).seconds

    assert seconds(slow_prefill(0.0)) < seconds(slow_prefill(1e-5)) < seconds(slow_prefill(1e-4))


@pytest.mark.parametrize(("is_padded", "prompt_rows", "rows"), [(False, 0, 10), (True, 0, 20), (True, 64, 15)])
def test_rows_of_a_padded_step(is_padded: bool, prompt_rows: int, rows: int) -> None:
    """Three sequences of which the deepest drafts four tokens: four slots, or three sequences beside prompts."""
    profile = replace(PROFILE, is_padded=is_padded)
    step = PolicyDepths(profile, 8).round_of([4, 2, 1], Rounds(profile, SPECULATION), 3, prompt_rows)
    assert step.rows == rows


def test_a_padded_batch_waits_for_the_draft_prefills_of_most_of_it() -> None:
    jobs = [job(number, has_draft=number == 0) for number in range(4)]
    steps = run_steps(PolicyDepths(replace(PROFILE, is_padded=True), 8), jobs)
    [prefill] = [number for number, (_, extra) in enumerate(steps) if extra > 1e-9]
    assert steps[prefill][0] == [0] * 4
    assert any(all(depths) for depths, _ in steps[prefill + 1 :])


def test_a_step_with_draft_prefills_alone_does_not_make_drafts_free() -> None:
    """The policy learns the time of drafts from steps that draft: deeper if they take no time."""

    def mean_depth(draft_seconds: float) -> float:
        curve = replace(PROFILE.draft_seconds, points=((1, draft_seconds),))
        policy, dice, seen = PolicyDepths(replace(PROFILE, draft_seconds=curve), 8), random.Random(0), []
        rounds, jobs = Rounds(replace(PROFILE, draft_seconds=curve), SPECULATION), [job(i) for i in range(64)]
        for _ in range(120):
            depths = policy.decide(jobs)
            step = policy.round_of(depths, rounds, 1)
            accepted = [num_accepted(step.kinds[0], depth, dice) for depth in depths]
            policy.observe(jobs, depths, accepted, 300 * len(jobs), step, 0, rounds)
            seen += [max(depths)] if max(depths) else []
        return fmean(seen[20:])

    assert mean_depth(1e-3) + 1.0 < mean_depth(1e-6)
