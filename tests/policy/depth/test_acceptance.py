"""Alpha by position: what is learned, what is censored, what is forgotten."""

import random
from itertools import pairwise

import pytest

from paceline.core.errors import InvalidConfig
from paceline.policy.depth.acceptance import Acceptance, known_positions
from tests.traffic import CHAT, CODE


@pytest.mark.parametrize(("drafted", "accepted", "known"), [(4, 0, 1), (4, 2, 3), (4, 3, 4), (4, 4, 4), (0, 0, 0)])
def test_positions_after_the_first_rejection_are_not_tested(drafted: int, accepted: int, known: int) -> None:
    assert known_positions(drafted, accepted) == known


def test_the_prior_holds_without_rounds() -> None:
    assert Acceptance(3).alphas(CHAT) == pytest.approx((0.7, 0.7, 0.7))


def test_one_round_by_hand() -> None:
    """A prior of 0.7 weighs 4 rounds; with a window of 128 the round weighs g = 128/127 of the prior's unit."""
    acceptance = Acceptance(3)
    acceptance.observe(CHAT, drafted=3, accepted=1)
    g = 128 / 127
    first = (2.8 + g) / (4 + g)
    second = (0 + 4 * g * first) / (g + 4 * g)
    assert acceptance.alphas(CHAT) == pytest.approx((first, second, second))


def test_learns_each_position_from_sampled_rounds() -> None:
    truth = (0.9, 0.6, 0.3)
    acceptance, dice = Acceptance(3, window=5000), random.Random(1)
    for _ in range(10_000):
        accepted = 0
        while accepted < 3 and dice.random() < truth[accepted]:
            accepted += 1
        acceptance.observe(CHAT, 3, accepted)
    assert acceptance.alphas(CHAT) == pytest.approx(truth, abs=0.03)
    a, b, c = acceptance.alphas(CHAT)
    assert acceptance.survival(CHAT) == pytest.approx((a, a * b, a * b * c))


def test_alpha_does_not_depend_on_the_depth_drafted() -> None:
    """accepted / drafted would be 0.41 at depth 7 and 0.775 at depth 1."""
    for depth in (1, 7):
        acceptance, dice = Acceptance(7, window=5000), random.Random(2)
        for _ in range(8000):
            accepted = 0
            while accepted < depth and dice.random() < 0.775:
                accepted += 1
            acceptance.observe(CHAT, depth, accepted)
        assert acceptance.alphas(CHAT)[0] == pytest.approx(0.775, abs=0.02)


def test_old_rounds_are_forgotten() -> None:
    acceptance = Acceptance(1, window=20)
    for _ in range(200):
        acceptance.observe(CHAT, 1, 0)
    assert acceptance.alphas(CHAT)[0] < 0.01
    for _ in range(60):
        acceptance.observe(CHAT, 1, 1)
    assert acceptance.alphas(CHAT)[0] > 0.9


def test_a_position_no_longer_drafted_drifts_to_the_one_before() -> None:
    acceptance = Acceptance(2, window=50)
    for _ in range(200):
        acceptance.observe(CHAT, 2, 1)
    assert acceptance.alphas(CHAT)[1] < 0.1
    for _ in range(300):
        acceptance.observe(CHAT, 1, 1)
    assert acceptance.alphas(CHAT)[1] > 0.8


def test_a_probe_outweighs_discounted_evidence() -> None:
    firm, discounted = Acceptance(1), Acceptance(1)
    for acceptance in (firm, discounted):
        for _ in range(300):
            acceptance.observe(CHAT, 1, 0)
    discounted.discount(CHAT)
    assert discounted.alphas(CHAT) == firm.alphas(CHAT)
    for acceptance in (firm, discounted):
        for _ in range(8):
            acceptance.observe(CHAT, 1, 1)
    assert firm.alphas(CHAT)[0] < 0.1
    assert discounted.alphas(CHAT)[0] > 0.45


def test_a_missing_draft_is_no_rejection() -> None:
    acceptance = Acceptance(2)
    for _ in range(300):
        acceptance.observe(CHAT, drafted=0, accepted=0, requested=4)
    assert acceptance.alphas(CHAT)[0] == pytest.approx(0.7)
    assert acceptance.delivery(CHAT) < 0.05
    assert acceptance.delivery(CODE) == 1.0


def test_categories_are_separate_and_empty_rounds_are_ignored() -> None:
    acceptance = Acceptance(2)
    acceptance.observe(CHAT, 2, 0)
    acceptance.observe(CODE, 0, 0)
    assert acceptance.alphas(CODE) == pytest.approx((0.7, 0.7))
    assert acceptance.alphas(CHAT)[0] < 0.7


def test_sums_do_not_overflow() -> None:
    acceptance = Acceptance(2, window=2)
    for _ in range(5000):
        acceptance.observe(CHAT, 2, 1)
    assert acceptance.alphas(CHAT)[0] == pytest.approx(1.0)


def test_invalid_input_is_rejected() -> None:
    with pytest.raises(InvalidConfig, match="max_depth"):
        Acceptance(0)
    with pytest.raises(ValueError, match="accepted"):
        Acceptance(2).observe(CHAT, 2, 3)


# --- trees

SIBLINGS = (0.5, 0.3, 0.15, 0.05)
"""Probabilities of four siblings, of which the target takes at most one."""


def observe_siblings(acceptance: Acceptance, rounds: int, num_nodes: int = 4) -> None:
    dice = random.Random(3)
    for _ in range(rounds):
        (node,) = dice.choices(range(4), SIBLINGS)
        path = (node,) if node < num_nodes else ()
        acceptance.observe(CHAT, 1, len(path), 4, num_nodes, path)


def test_a_chain_reported_as_a_tree_is_the_same_chain() -> None:
    chain, tree, dice = Acceptance(5), Acceptance(5), random.Random(4)
    for _ in range(200):
        accepted = dice.randint(0, 4)
        chain.observe(CHAT, 4, accepted)
        tree.observe(CHAT, 4, accepted, 0, 4, tuple(range(accepted)))
    assert tree.alphas(CHAT) == chain.alphas(CHAT)
    assert tree.survival(CHAT) == chain.survival(CHAT)


def test_each_node_of_a_tree_has_its_own_probability() -> None:
    acceptance = Acceptance(4, window=4000)
    observe_siblings(acceptance, 8000)
    assert acceptance.survival(CHAT) == pytest.approx((0.5, 0.3, 0.15, 0.05), abs=0.025)
    assert acceptance.alphas(CHAT)[0] > 0.99  # by level: one of the four is always accepted


def test_a_shorter_tree_does_not_change_later_nodes() -> None:
    acceptance = Acceptance(4, window=4000)
    observe_siblings(acceptance, 8000)
    observe_siblings(acceptance, 8000, num_nodes=2)
    assert acceptance.survival(CHAT) == pytest.approx((0.5, 0.3, 0.15, 0.05), abs=0.03)


def test_nodes_never_drafted_are_extrapolated() -> None:
    acceptance = Acceptance(12)
    observe_siblings(acceptance, 500)
    values = acceptance.survival(CHAT)
    assert all(0.0 < later <= earlier for earlier, later in pairwise(values))
    assert values[4] < values[2]


def test_node_probabilities_never_increase() -> None:
    acceptance = Acceptance(4)
    for i in range(400):
        path = ((0,), (1,), (1,), ())[i % 4]  # the second is taken more often than the first
        acceptance.observe(CHAT, 1, len(path), 4, 4, path)
    values = acceptance.survival(CHAT)
    assert values[0] == pytest.approx(values[1])
    assert values[0] + values[1] == pytest.approx(0.75, abs=0.05)
    assert values[3] <= values[2] < 0.1


def test_a_probe_outweighs_discounted_evidence_of_a_tree() -> None:
    firm, discounted = Acceptance(4), Acceptance(4)
    for acceptance in (firm, discounted):
        for _ in range(300):
            acceptance.observe(CHAT, 1, 0, 4, 4, ())
    assert firm.survival(CHAT)[0] < 0.03
    discounted.discount(CHAT)
    for acceptance in (firm, discounted):
        for _ in range(8):
            acceptance.observe(CHAT, 1, 1, 1, 1, (0,))
    assert firm.survival(CHAT)[0] < 0.12
    assert discounted.survival(CHAT)[0] > 0.45


def test_sums_of_trees_do_not_overflow() -> None:
    acceptance = Acceptance(2, window=2)
    for _ in range(5000):
        acceptance.observe(CHAT, 1, 1, 2, 2, (0,))
    assert acceptance.survival(CHAT)[0] == pytest.approx(1.0)
