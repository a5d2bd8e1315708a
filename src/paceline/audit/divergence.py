"""Kullback-Leibler divergence between a distribution that was used and the one that a plain pass gives."""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.noise import Purpose, gumbel
from paceline.speculation.verification.rows import RowContext

NOTHING = 1e-12
"""Below this it does not matter whether a probability is 0: where float32 ends is the exponential's business."""
TIE = 1e-5
"""Scores this close are one: q went through an exponential and a logarithm since it was drawn from."""
FLOOR = 1e-8


def limit(tolerance: float, temperature: float) -> float:
    """The most that rounding explains. Logits that are off by d make KL about Var(d / T) / 2; here every |d| <= tolerance."""
    return max(FLOOR, 2.0 * (tolerance / temperature) ** 2)


def divergence(used: Tensor, logits: Tensor, row: RowContext, tolerance: float) -> float:
    """KL(used || plain) of one row: used [V] are probabilities, logits [V] a plain pass's. inf: something was possible that
    should not have been, or the reverse. A token on the very edge of a truncation may fall on either side: it is left out."""
    plain = log_distribution(logits.unsqueeze(0), [row])[0].double().exp()
    u = used.to(plain.device).double()
    both = (u > 0) & (plain > 0)
    alone = ((u > 0) ^ (plain > 0)) & (u + plain > NOTHING)
    if bool(alone.any()) and not _is_edge(alone, plain > 0, logits, row, tolerance):
        return torch.inf
    u, plain = u[both] / u[both].sum(), plain[both] / plain[both].sum()
    return max(0.0, float((u * (u / plain).log()).sum()))


def is_draw(q: Tensor, drafted: int, row: RowContext) -> bool:
    """Whether `drafted` is what the draft's noise draws from `q` at this position: argmax(log q + G)."""
    scores = q.double().log() + gumbel([row.key], Purpose.DRAFT, len(q), q.device)[0]
    return float(scores.max() - scores[drafted]) <= TIE


def _is_edge(alone: Tensor, kept: Tensor, logits: Tensor, row: RowContext, tolerance: float) -> bool:
    whole = replace(row, params=replace(row.params, top_k=0, top_p=1.0, min_p=0.0))
    scores = log_distribution(logits.unsqueeze(0), [whole])[0]
    edge = scores[kept].min()
    return bool(((scores[alone] - edge).abs() <= tolerance / row.params.temperature).all())
