from dataclasses import replace

import pytest

from paceline.planning.profiles.profile_file import load_profile
from paceline.planning.simulation.config import Speculation
from paceline.planning.simulation.workers.rounds import Rounds

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
