"""A target and drafts small enough to know their distributions exactly: Markov chains over a handful of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from paceline.core.request import SamplingParams, Verification
from paceline.speculation.distribution.distribution import log_distribution
from paceline.speculation.drafts.drafts import Draft, DraftProbs
from paceline.speculation.rows.rows import RowContext
from paceline.speculation.verification.verification import Round, Verdict, verify

VOCAB = 5
LENGTH = 4


@dataclass
class Trial:
    """Satisfies `Facts`."""

    ids: list[int]
    seed: int
    sampling: SamplingParams
    num_prompt: int = 1
    choice: int = 0


Drafter = Callable[[Sequence[Trial]], list[Draft]]


def table(seed: int, spread: float = 1.2) -> Tensor:
    """[V, V] logits of the next token by the last one."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def step(trials: Sequence[Trial], target: Tensor, drafts: Sequence[Draft], rule: Verification) -> list[Verdict]:
    rounds = [Round.of(trial, draft, rule) for trial, draft in zip(trials, drafts, strict=True)]
    last = [row.path[-1] if row.path else row.ids[-1] for round_ in rounds for row in round_.rows]
    return verify(target[last], rounds)


def generate(
    count: int, target: Tensor, drafter: Drafter, rule: Verification, params: SamplingParams, length: int = LENGTH
) -> Tensor:
    """[count, length] tokens, trial by trial with its own seed, all from the same one-token prompt."""
    trials = [Trial([0], seed, params) for seed in range(count)]
    open_ = trials
    while open_:
        for trial, verdict in zip(open_, step(open_, target, drafter(open_), rule), strict=True):
            trial.ids.extend(verdict.tokens)
        open_ = [trial for trial in open_ if len(trial.ids) <= length]
    return torch.tensor([trial.ids[1 : length + 1] for trial in trials])


def transition(logits: Tensor, params: SamplingParams) -> Tensor:
    """[V, V] float64 probabilities after `params`."""
    rows = [RowContext(params, 0, 0, 1, [0], 1) for _ in range(len(logits))]
    p = log_distribution(logits, rows).double().exp()
    return p / p.sum(1, keepdim=True)


def p_value(samples: Tensor, p: Tensor) -> float:
    """Chi-square of the joint distribution of whole texts; cells that expect under five are pooled."""
    length = samples.shape[1]
    joint = p[0]
    for _ in range(length - 1):
        joint = (joint.unsqueeze(1) * p.repeat(len(joint) // VOCAB, 1)).flatten()
    code = torch.zeros(len(samples), dtype=torch.int64)
    for i in range(length):
        code = code * VOCAB + samples[:, i]
    observed = torch.bincount(code, minlength=VOCAB**length).numpy().astype(np.float64)
    expected = joint.numpy() * len(samples)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    pooled = [np.append(values[~rare], values[rare].sum()) for values in (observed, expected)]
    if pooled[1][-1] < 5:
        pooled = [np.append(values[:-2], values[-2:].sum()) for values in pooled]
    return float(stats.chisquare(*pooled).pvalue)


def tree_drafter(
    draft: Tensor, parents: tuple[int, ...], q: str, params: SamplingParams, reported: SamplingParams | None = None
) -> Drafter:
    """Drafts of one shape. `q` is "onehot" (the likeliest children), "dense" or "sparse" (drawn without replacement).

    `reported` plants a lie: the `q` of other parameters than those the tokens were drawn with.
    """
    p, claimed = transition(draft, params).float(), transition(draft, reported or params).float()
    generator = torch.Generator().manual_seed(99)
    families: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        families.setdefault(parent, []).append(node)

    def drafter(trials: Sequence[Trial]) -> list[Draft]:
        tokens = torch.empty(len(trials), len(parents), dtype=torch.int64)
        distributions = torch.empty(len(trials), len(parents), VOCAB)
        ends = torch.tensor([trial.ids[-1] for trial in trials])
        for parent, children in families.items():
            last = ends if parent < 0 else tokens[:, parent]
            if q == "onehot":
                tokens[:, children] = p[last].topk(len(children)).indices
            else:
                tokens[:, children] = torch.multinomial(p[last], len(children), generator=generator)
            distributions[:, children] = claimed[last].unsqueeze(1)
        probs = None
        if q == "dense":
            probs = DraftProbs(distributions.flatten(0, 1))
        elif q == "sparse":
            best = distributions.flatten(0, 1).topk(VOCAB - 1)  # the smallest is truncated away or padding
            probs = DraftProbs(best.values, best.indices)
        n = len(parents)
        return [Draft(tuple(row), parents, probs, slice(i * n, (i + 1) * n)) for i, row in enumerate(tokens.tolist())]

    return drafter
