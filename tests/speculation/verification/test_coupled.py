"""Coupled verification: the same text, word for word, whatever was drafted."""

import random
from collections.abc import Sequence

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.core.sequence import Origin
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.verification.verification import walk
from tests.speculation.toys import VOCAB, Trial, generate, p_value, step, table, transition, tree_drafter

SAMPLED = [
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(top_p=0.8, presence_penalty=0.6, frequency_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
]


def plain(trials: Sequence[Trial]) -> list[Draft]:
    return [Draft()] * len(trials)


def random_trees(trials: Sequence[Trial]) -> list[Draft]:
    rng = random.Random(sum(len(trial.ids) for trial in trials))
    drafts = []
    for _ in trials:
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(rng.randrange(9)):
            parent, token = rng.randrange(-1, node), rng.randrange(VOCAB)
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(min(parent, len(tokens) - 2))
        drafts.append(Draft(tuple(tokens), tuple(parents)))
    return drafts


@pytest.mark.parametrize("params", SAMPLED)
def test_text_is_the_same_with_any_drafts(params: SamplingParams) -> None:
    target = table(1)
    expected = generate(120, target, plain, "coupled", params, length=12)
    draft = table(1) + 0.5 * table(2)
    for drafter in (
        random_trees,
        tree_drafter(draft, (-1, 0, 1, 2), "onehot", SamplingParams()),
        tree_drafter(draft, (-1, -1, -1, 0, 0, 1, 3), "dense", SamplingParams()),
    ):
        assert torch.equal(generate(120, target, drafter, "coupled", params, length=12), expected)


def test_plain_sampling_follows_the_target() -> None:
    params = SamplingParams(temperature=0.9, top_k=4)
    samples = generate(8_000, table(1), plain, "coupled", params)
    assert p_value(samples, transition(table(1), params)) > 1e-3
    assert p_value(samples, transition(table(1), SamplingParams(temperature=1.0, top_k=4))) < 1e-6


def test_a_full_tree_is_always_accepted() -> None:
    target = table(3)
    parents = (-1,) * VOCAB + tuple(node for node in range(VOCAB) for _ in range(VOCAB))
    draft = Draft(tuple(range(VOCAB)) * (VOCAB + 1), parents)
    trials = [Trial([0], seed, SamplingParams()) for seed in range(50)]
    for verdict in step(trials, target, [draft] * 50, "coupled"):
        assert verdict.origins == (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)
        assert verdict.tokens[:2] == tuple(draft.tokens[node] for node in verdict.path)


def test_walk() -> None:
    #     0:7   1:8
    #    /  \     \
    #  2:7  3:8   4:7
    draft = Draft((7, 8, 7, 8, 7), (-1, -1, 0, 0, 1))
    assert walk(draft, [8, 0, 7, 0, 0, 3]) == ([1, 4], 3)
    assert walk(draft, [7, 8, 0, 0, 5, 0]) == ([0, 3], 5)
    assert walk(draft, [7, 9, 7, 7, 7, 7]) == ([0], 9)
    assert walk(draft, [9, 7, 7, 7, 7, 7]) == ([], 9)
    assert walk(Draft(), [4]) == ([], 4)


def test_origins() -> None:
    target = torch.full((VOCAB, VOCAB), -5.0)
    for token in range(VOCAB):
        target[token, (token + 1) % VOCAB] = 5.0  # the text counts: 1 2 3 4 0 1 ...
    greedy = SamplingParams(temperature=0.0)
    cases = {
        Draft(): ((), (1,), (Origin.PLAIN,)),
        Draft((1, 2), (-1, 0)): ((0, 1), (1, 2, 3), (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)),
        Draft((1, 3), (-1, 0)): ((0,), (1, 2), (Origin.ACCEPTED, Origin.RECOVERED)),
        Draft((3, 2), (-1, 0)): ((), (1,), (Origin.RECOVERED,)),
        Draft((3, 1), (-1, -1)): ((1,), (1, 2), (Origin.ACCEPTED, Origin.BONUS)),
        Draft((3, 1, 2), (-1, -1, 0)): ((1,), (1, 2), (Origin.ACCEPTED, Origin.BONUS)),
    }
    for rule in ("coupled", "rejection"):
        verdicts = step([Trial([0], 0, greedy)] * len(cases), target, list(cases), rule)
        assert [(v.path, v.tokens, v.origins) for v in verdicts] == list(cases.values())


def test_verdicts_tell_what_the_target_picked_in_every_row() -> None:
    """Of coupled rounds; in a round by probability nothing is picked but what follows."""
    target = torch.full((VOCAB, VOCAB), -5.0)
    for token in range(VOCAB):
        target[token, (token + 1) % VOCAB] = 5.0
    greedy, sampled = (Trial([0], 0, SamplingParams(temperature=heat)) for heat in (0.0, 1e-3))
    draft = Draft((1, 3, 2), (-1, -1, 0))
    assert [v.picks for v in step([greedy] * 2, target, [draft, Draft()], "coupled")] == [(1, 2, 4, 3), (1,)]
    assert [v.picks for v in step([greedy, sampled], target, [draft] * 2, "rejection")] == [(1, 2, 4, 3), ()]
