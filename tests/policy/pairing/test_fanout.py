import pytest

from paceline.core.errors import InvalidConfig
from paceline.policy.pairing.outcomes import AlternativeOdds, likely_outcomes


def test_most_probable_outcomes_within_the_node_budget():
    outcomes = likely_outcomes([0.8], [0.5, 0.2], offered=3, depth=4, nodes=16)
    # 16 nodes are four chains of 4; one is the continued draft itself
    assert [(o.accepted, o.alternative) for o in outcomes] == [(0, 0), (1, 0), (2, 0)]
    assert outcomes[0].probability == pytest.approx(0.2 * 0.5)
    assert outcomes[2].probability == pytest.approx(0.8**2 * 0.2 * 0.5)


def test_outcomes_follow_the_acceptance_by_position():
    late = likely_outcomes([0.99, 0.99, 0.3], [0.6], offered=3, depth=4, nodes=12)
    assert [o.accepted for o in late] == [2, 3]
    early = likely_outcomes([0.3, 0.9, 0.9], [0.6], offered=3, depth=4, nodes=12)
    assert early[0].accepted == 0


def test_independent_bonus_token_needs_a_branch():
    with_own = likely_outcomes([0.9], [0.5], offered=2, depth=2, nodes=100)
    apart = likely_outcomes([0.9], [0.5], offered=2, depth=2, nodes=100, continues=False)
    chance = {o.accepted: o.probability for o in apart}
    assert chance[2] == pytest.approx(0.81 * 0.5)
    assert {o.accepted: o.probability for o in with_own}[2] == pytest.approx(0.81 * 0.1 * 0.5)


@pytest.mark.parametrize(("depth", "nodes"), [(0, 100), (4, 0), (4, 7)])
def test_no_branches_without_nodes(depth, nodes):
    assert likely_outcomes([0.8], [0.5], 3, depth, nodes) == []


def test_improbable_outcomes_are_left_out():
    assert all(o.probability >= 0.005 for o in likely_outcomes([0.5], [0.5, 0.001], 8, 1, 1000))


def test_odds_follow_recent_outcomes():
    odds = AlternativeOdds(window=32)
    for _ in range(200):
        odds.observe(1)
    assert odds.odds[1] > 0.95
    for _ in range(200):
        odds.observe(None)
    assert max(odds.odds) < 0.05
    odds.observe(99)
    assert len(odds.odds) == 4
    with pytest.raises(InvalidConfig):
        AlternativeOdds(1.0)
