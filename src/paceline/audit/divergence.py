"""Kullback-Leibler divergence of a used distribution from that of a plain pass."""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.noise import Purpose, gumbel
from paceline.speculation.verification.rows import RowContext

NEGLIGIBLE = 1e-12
"""Probabilities below this count as 0: float32 underflow depends on the implementation of exp."""
TIE = 1e-5
"""Largest difference of equal scores: q went through exp and log since it was sampled from."""
FLOOR = 1e-8


def limit(tolerance: float, temperature: float) -> float:
    """The largest KL that rounding explains. An error d of the logits makes KL about Var(d / T) / 2, and here |d| <=
    tolerance."""
    return max(FLOOR, 2.0 * (tolerance / temperature) ** 2)


def divergence(used: Tensor, logits: Tensor, row: RowContext, tolerance: float) -> float:
    """KL(used || plain) of one row: `used` [V] are probabilities, `logits` [V] those of a plain pass.

    It is infinite if the two distributions have different possible tokens. Tokens within rounding of a truncation's edge are
    excluded.
    """
    plain = log_distribution(logits.unsqueeze(0), [row])[0].double().exp()
    u = used.to(plain.device).double()
    both = (u > 0) & (plain > 0)
    alone = ((u > 0) ^ (plain > 0)) & (u + plain > NEGLIGIBLE)
    if bool(alone.any()) and not _is_edge(alone, plain > 0, logits, row, tolerance):
        return torch.inf
    u, plain = u[both] / u[both].sum(), plain[both] / plain[both].sum()
    return max(0.0, float((u * (u / plain).log()).sum()))


def is_sample(q: Tensor, drafted: int, row: RowContext) -> bool:
    """Whether `drafted` is the sample of `q` under the draft's noise at this position: argmax(log q + G)."""
    scores = q.double().log() + gumbel([row.key], Purpose.DRAFT, len(q), q.device)[0]
    return float(scores.max() - scores[drafted]) <= TIE


def _is_edge(alone: Tensor, kept: Tensor, logits: Tensor, row: RowContext, tolerance: float) -> bool:
    whole = replace(row, params=replace(row.params, top_k=0, top_p=1.0, min_p=0.0))
    scores = log_distribution(logits.unsqueeze(0), [whole])[0]
    edge = scores[kept].min()
    return bool(((scores[alone] - edge).abs() <= tolerance / row.params.temperature).all())
