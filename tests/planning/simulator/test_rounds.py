from dataclasses import replace

import pytest

from paceline.planning.profile import load_profile
from paceline.planning.simulator.rounds import CONTEXT_STEP, MARGIN, PROMPT_STEP, Rounds
from paceline.planning.simulator.settings.config import Speculation
from paceline.policy.cost.cost import MethodCosts, TargetCosts, estimates_by_depth
from paceline.policy.depth.prompt_load import MANY_ROWS

PROFILE = load_profile("h200-8b")


def test_the_rule_fixed_drafts_to_the_largest_depth_also_at_a_loss() -> None:
    poor = Speculation((0.05,), max_depth=3)
    assert Rounds(PROFILE, poor).best(64, 64 * 300.0, 64).depth == 0
    fixed = Rounds(PROFILE, replace(poor, rule="fixed")).best(64, 64 * 300.0, 64)
    assert fixed.depth == 3
    assert fixed.rows == 64 * 4
    assert fixed.tokens == pytest.approx(1.0 + 0.05 + 0.05**2 + 0.05**3)
    assert Rounds(PROFILE, replace(poor, rule="fixed")).best(64, 64 * 300.0, 0).depth == 0, "nothing can draft"


def test_a_batch_waits_for_the_last_of_the_drafts_of_a_pool() -> None:
    rounds = Rounds(PROFILE, Speculation((0.8,)), network_seconds=1e-4)
    ready, demand = rounds.ready_share(4), PROFILE.drafting_seconds(1, 4)
    late = max(0.0, PROFILE.drafting_seconds(8, 4) - rounds.pass_seconds(5))
    assert 0.0 < ready < 1.0
    assert rounds.waiting_seconds(1, 1, 4) == pytest.approx(1e-4 + late + (1.0 - ready) * demand)
    several, demand = rounds.waiting_seconds(8, 8, 4), PROFILE.drafting_seconds(8, 4)
    late = max(0.0, PROFILE.drafting_seconds(64, 4) - rounds.pass_seconds(40))
    assert several == pytest.approx(1e-4 + min(demand, late + (1.0 - ready**8) * demand))


@pytest.mark.parametrize(("batch", "network", "depth"), [(64, 0.0, 0), (64, 1e-4, 3), (8, 0.0, 3)])
def test_a_large_batch_in_the_slots_of_a_gpu_drafts_nothing_beside_many_prompt_rows(
    batch: int, network: float, depth: int
) -> None:
    rounds = Rounds(PROFILE, Speculation((0.9,), max_depth=3, rule="fixed"), network)
    assert rounds.best(batch, batch * 300.0, batch, MANY_ROWS - PROMPT_STEP).depth == 3
    assert rounds.best(batch, batch * 300.0, batch, MANY_ROWS).depth == depth


@pytest.mark.parametrize("network", [0.0, 1e-4])
@pytest.mark.parametrize("alphas", [(0.8,), (0.9, 0.6, 0.3), (0.3,)])
def test_the_depth_is_that_of_the_cost_model(alphas: tuple[float, ...], network: float) -> None:
    rounds, chosen = Rounds(PROFILE, Speculation(alphas, max_depth=6), network), set()
    for batch in (1, 7, 40, 200):
        for context, prompt_rows in ((300, 0), (9000, 0), (9000, MANY_ROWS - PROMPT_STEP)):
            bucket = (context // CONTEXT_STEP + 0.5) * CONTEXT_STEP
            reading, prompts = (
                PROFILE.context_seconds.value * bucket * batch,
                -(-prompt_rows // PROMPT_STEP) * PROMPT_STEP,
            )
            passes = {
                rows: PROFILE.rows_seconds(rows, prompts) + reading for rows in range(batch, 7 * batch + 1, batch)
            }
            drafts = {depth: rounds.waiting_seconds(batch, batch, depth) for depth in range(1, 7)}
            found = estimates_by_depth(TargetCosts(passes, batch), MethodCosts("draft_model", alphas, drafts), 6)
            best = max(found, key=lambda one: one.speedup)
            depth = best.depth if best.speedup >= MARGIN else 0
            assert rounds.best(batch, float(context * batch), batch, prompt_rows).depth == depth
            chosen.add(depth)
    assert len(chosen) > 1
