import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from benchmarks.planner.text_fit import TextRounds, fit_texts

from paceline.planning.simulator.texts import KINDS, kinds_of_texts, pooled_alphas


def drawn_texts(alphas: tuple[float, ...], spread: float, texts: int, rounds: int) -> list[TextRounds]:
    dice, kinds, found = random.Random(3), kinds_of_texts(alphas, spread), []
    for _ in range(texts):
        own, accepted = dice.choice(kinds), [0.0] * len(alphas)
        for _ in range(rounds):
            for position, alpha in enumerate(own):
                if dice.random() >= alpha:
                    break
                accepted[position] += 1
        found.append(TextRounds((float(rounds), *accepted[:-1]), tuple(accepted)))
    return found


def test_the_kinds_of_texts_have_the_given_means_and_differ_by_the_spread() -> None:
    kinds = kinds_of_texts((0.8, 0.5, 0.0, 1.0), 1.0)
    assert len(kinds) == KINDS
    assert [fmean(column) for column in zip(*kinds, strict=True)] == pytest.approx([0.8, 0.5, 0.0, 1.0])
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(kinds))
    wider = kinds_of_texts((0.8,), 2.0)
    assert pstdev(one[0] for one in wider) > pstdev(one[0] for one in kinds)
    assert kinds_of_texts((0.8, 0.7), 0.0) == ((0.8, 0.7),)


def test_a_batch_has_more_rounds_of_texts_with_a_low_alpha() -> None:
    kinds = ((0.2,), (0.8,))
    [first, second] = pooled_alphas(kinds, 2)
    # One draft: 1.2 and 1.8 tokens a round, so a token takes (1 / 1.2 + 1 / 1.8) / 2 rounds
    assert 1.0 + first == pytest.approx(2.0 / (1.0 / 1.2 + 1.0 / 1.8))
    assert first < 0.5
    assert second > first, "of texts whose first draft was accepted, more have a high alpha"
    assert pooled_alphas(((0.7, 0.6),), 5) == (0.7, 0.6)


@pytest.mark.parametrize(
    ("alphas", "spread", "texts", "rounds"),
    [
        ((0.5, 0.4, 0.3), 1.2, 1500, 4),  # many short texts are equal, and the fit computes equal ones once
        ((0.8, 0.7), 0.5, 200, 20),
    ],
)
def test_the_fit_recovers_alphas_and_spread(alphas: tuple[float, ...], spread: float, texts: int, rounds: int) -> None:
    found, deviation = fit_texts(drawn_texts(alphas, spread, texts, rounds))
    assert found == pytest.approx(alphas, abs=0.04)
    assert deviation == pytest.approx(spread, abs=0.15)


def test_texts_that_are_alike_have_about_no_spread() -> None:
    _, deviation = fit_texts(drawn_texts((0.6,), 0.0, 300, 20))
    assert deviation < 0.2
