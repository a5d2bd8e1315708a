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
