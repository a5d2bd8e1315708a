"""Rejection sampling: the joint distribution of four tokens is the target's, for every shape and kind of draft."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.sequence import Origin
from paceline.speculation.distribution.distribution import sample_draft
from paceline.speculation.drafts.drafts import Draft, DraftProbs
from paceline.speculation.rows.noise import Purpose, uniform
from paceline.speculation.rows.rows import RowContext
from paceline.speculation.verification import rejection
from paceline.speculation.verification.verification import Round, verify
from tests.speculation.toys import LENGTH, Drafter, Trial, generate, p_value, step, table, transition, tree_drafter

TARGET, DRAFT = table(1), table(1) + 0.8 * table(2)
PARAMS = SamplingParams(temperature=0.9, top_k=4)
DRAFT_PARAMS = SamplingParams(temperature=1.2, top_k=3)
CHAIN = (-1, 0, 1)
TREE = (-1, -1, -1, 0, 0, 1, 3)
TRIALS = 4_000


def chance(drafter: Drafter) -> float:
    """The p-value of what this drafter made the target say."""
    return p_value(generate(TRIALS, TARGET, drafter, "rejection", PARAMS), transition(TARGET, PARAMS))


@pytest.mark.parametrize("q", ["onehot", "dense", "sparse"])
@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_joint_distribution_is_the_targets(parents: tuple[int, ...], q: str) -> None:
    assert chance(tree_drafter(DRAFT, parents, q, DRAFT_PARAMS)) > 1e-3


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_plain_steps_between_rounds_change_nothing(parents: tuple[int, ...]) -> None:
    drafter = tree_drafter(DRAFT, parents, "dense", DRAFT_PARAMS)

    def sometimes(trials: list[Trial]) -> list[Draft]:
        return [
            draft if trial.seed % 3 != len(trial.ids) % 3 else Draft()
            for trial, draft in zip(trials, drafter(trials), strict=True)
        ]

    assert chance(sometimes) > 1e-3


def test_planted_q_before_truncation_is_caught() -> None:
    liar = tree_drafter(DRAFT, CHAIN, "dense", DRAFT_PARAMS, reported=SamplingParams(temperature=1.2))
    assert chance(liar) < 1e-6


def test_planted_bonus_after_a_rejected_last_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = rejection._walk_chains

    def planted(chains: Sequence[rejection._Chain], p: Tensor) -> list[rejection.Outcome]:
        return [
            (path, p[chain.row + len(chain.draft)] if len(path) == len(chain.draft) - 1 else rest)
            for chain, (path, rest) in zip(chains, walk(chains, p), strict=True)
        ]

    monkeypatch.setattr(rejection, "_walk_chains", planted)
    assert chance(tree_drafter(DRAFT, CHAIN, "dense", DRAFT_PARAMS)) < 1e-6


@pytest.mark.parametrize("kind", ["onehot", "sparse", "dense"])
def test_chains_at_once_and_one_by_one_agree(kind: str) -> None:
    """A chain is a tree that never forks: the batched walk and the walk down a tree say the same."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]])
    distributions = {
        "onehot": None,
        "sparse": DraftProbs(torch.tensor([[0.6, 0.4], [0.7, 0.3]]), torch.tensor([[0, 2], [1, 2]])),
        "dense": DraftProbs(torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.7, 0.2]])),
    }
    draft = Draft((0, 1), (-1, 0), distributions[kind], slice(0, 2))
    for uniforms in ([0.01, 0.01], [0.01, 0.99], [0.99, 0.01]):
        (path, rest), (tree_path, tree_rest) = (
            rejection._walk_chains([rejection._Chain(0, draft, 0, uniforms)], p)[0],
            rejection._walk_tree(draft, p, uniforms),
        )
        assert path == tree_path
        assert torch.allclose(rest / rest.sum(), tree_rest / tree_rest.sum())


def test_planted_recovery_from_p_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_without", lambda x, left, q: (left.clone(), q))
    assert chance(tree_drafter(DRAFT, TREE, "onehot", DRAFT_PARAMS)) < 1e-6


def test_planted_siblings_with_an_untouched_q_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    without = rejection._without
    monkeypatch.setattr(rejection, "_without", lambda x, left, q: (without(x, left, q)[0], q))
    assert chance(tree_drafter(DRAFT, TREE, "dense", DRAFT_PARAMS)) < 1e-6


def keyed_chains(trials: Sequence[Trial]) -> list[Draft]:
    """Chains of two drawn with the project's own draft noise."""
    tokens: list[list[int]] = [[] for _ in trials]
    distributions = []
    for _ in range(2):
        ends = [(*trial.ids, *drawn)[-1] for trial, drawn in zip(trials, tokens, strict=True)]
        rows = [
            RowContext(DRAFT_PARAMS, trial.seed, 0, len(trial.ids) + len(drawn), trial.ids, 1, tuple(drawn))
            for trial, drawn in zip(trials, tokens, strict=True)
        ]
        picked, q = sample_draft(DRAFT[ends], rows)
        distributions.append(q)
        for drawn, token in zip(tokens, picked.tolist(), strict=True):
            drawn.append(token)
    probs = DraftProbs(torch.stack(distributions, dim=1).flatten(0, 1))
    return [Draft(tuple(drawn), (-1, 0), probs, slice(2 * i, 2 * i + 2)) for i, drawn in enumerate(tokens)]


def test_draft_noise_is_exact() -> None:
    assert chance(keyed_chains) > 1e-3


def test_planted_acceptance_with_draft_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream for drafting and acceptance: a drafted token's noise is known to be large."""
    monkeypatch.setattr(rejection, "uniform", lambda keys, purpose, tokens: uniform(keys, Purpose.DRAFT, tokens))
    assert chance(keyed_chains) < 1e-6


def test_acceptance_is_optimal() -> None:
    """P(first accepted) = sum of min(p, q): exactness alone would allow rejecting everything."""
    count = 10_000
    trials = [Trial([0], seed, PARAMS) for seed in range(count)]
    drafts = tree_drafter(DRAFT, (-1,), "dense", DRAFT_PARAMS)(trials)
    accepted = sum(len(verdict.path) for verdict in step(trials, TARGET, drafts, "rejection"))
    p, q = transition(TARGET, PARAMS)[0], transition(DRAFT, DRAFT_PARAMS)[0]
    assert accepted / count == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.02)


@pytest.mark.parametrize("q", ["dense", "sparse"])
def test_a_draft_equal_to_the_target_is_always_accepted(q: str) -> None:
    trials = [Trial([0], seed, PARAMS) for seed in range(2000)]
    drafts = tree_drafter(TARGET, CHAIN, q, PARAMS)(trials)
    verdicts = step(trials, TARGET, drafts, "rejection")
    assert sum(len(verdict.path) == 3 for verdict in verdicts) >= 1999  # q went through float64 and back
    assert verdicts[0].origins[-1] is Origin.BONUS


def test_a_residual_that_rounds_to_nothing_falls_back_to_p() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = DraftProbs(torch.tensor([[0.50000006, 0.5, 0.0]]))
    draft, uniforms = Draft((0,), (-1,), q, slice(0, 1)), [1.0 - 2**-33]
    for path, rest in (
        rejection._walk_tree(draft, p, uniforms),
        *rejection._walk_chains([rejection._Chain(0, draft, 0, uniforms)], p),
    ):
        assert path == []
        assert torch.equal(rest, p[0])


def test_exhausted_siblings_leave_no_nan() -> None:
    """More siblings than q has tokens: the surplus is rejected and the residual stays a distribution."""
    p = torch.tensor([[0.2, 0.2, 0.2, 0.4]] + [[0.25] * 4] * 3)
    q = DraftProbs(torch.tensor([[0.6, 0.4, 0.0, 0.0]] * 3))
    draft = Draft((0, 1, 2), (-1, -1, -1), q, slice(0, 3))
    path, rest = rejection._walk_tree(draft, p, [0.999] * 3)
    assert path == []
    assert torch.isfinite(rest).all()
    assert rest.sum().item() == pytest.approx(1.0)
    assert rest[:2].tolist() == [0.0, 0.0]


def test_a_token_outside_its_own_q_is_rejected() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    draft = Draft((1,), (-1,), DraftProbs(torch.tensor([[1.0, 0.0]])), slice(0, 1))
    assert rejection._walk_chains([rejection._Chain(0, draft, 0, [0.1])], p)[0][0] == []


def test_a_mixed_batch_decides_as_each_would_alone() -> None:
    greedy = SamplingParams(temperature=0.0)
    rounds, logits = [], []
    for seed in range(60):
        trial = Trial([seed % 5], seed, greedy if seed % 4 == 0 else PARAMS)
        q = ("onehot", "dense", "sparse")[seed % 3]
        draft = tree_drafter(DRAFT, TREE if seed % 2 else CHAIN, q, DRAFT_PARAMS)([trial])[0]
        round_ = Round.of(trial, Draft() if seed % 7 == 0 else draft, "coupled" if seed % 5 == 0 else "rejection")
        last = [row.path[-1] if row.path else trial.ids[-1] for row in round_.rows]
        rounds.append(round_)
        logits.append(TARGET[last])
    together = verify(torch.cat(logits), rounds)
    assert together == [verify(rows, [round_])[0] for rows, round_ in zip(logits, rounds, strict=True)]
    assert len({len(verdict.path) for verdict in together}) >= LENGTH - 1


def test_plain_decoding_alone() -> None:
    """A batch without a single draft."""
    samples = generate(TRIALS, TARGET, lambda trials: [Draft()] * len(trials), "rejection", PARAMS)
    assert p_value(samples, transition(TARGET, PARAMS)) > 1e-3
    assert verify(torch.empty(0, 5), []) == []
