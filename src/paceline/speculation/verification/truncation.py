"""Truncation: min-p, then top-k, then top-p over the remaining tokens, in vLLM's order.

Tokens are ranked by score, equal scores by lower id, and a row keeps a prefix of that ranking. Ties at the boundary
are therefore resolved alike on every path and in every batch. Masses are summed in float64.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams

WIDTH = 256
"""Candidates ranked first without top-k; rows that need more get 16 times as many, up to all."""


class Kept(NamedTuple):
    """Rows of the input that were truncated together, and the tokens they keep."""

    rows: Tensor  # [r] int64
    tokens: Tensor  # [r, M] int64, best first
    scores: Tensor  # [r, M] float32, -inf past the last kept token


def truncate(scores: Tensor, params: Sequence[SamplingParams], width: int = WIDTH) -> Iterator[Kept]:
    """Returns every row of scores [R, V] exactly once. Scores are logits / temperature with maximum 0."""
    vocab_size, device = scores.shape[1], scores.device
    limits = _Limits.of(params, vocab_size, device)
    rows = torch.arange(len(params), device=device)
    width = max(p.top_k + 16 if p.top_k else width for p in params)  # some more, for ties
    while True:
        width = min(width, vocab_size)
        tokens, ranked, keep = _cut(scores, limits, width)
        # A row is complete if all tokens with the score of its last kept one are among the candidates
        last = ranked.gather(1, (keep.sum(1, keepdim=True) - 1).clamp_(min=0))  # clamped: NaN logits keep nothing
        settled = (last > ranked[:, -1:]).squeeze(1)
        ranked.masked_fill_(~keep, -torch.inf)
        if width == vocab_size or bool(settled.all()):
            yield Kept(rows, tokens, ranked)
            return
        if bool(settled.any()):
            yield Kept(rows[settled], tokens[settled], ranked[settled])
        open_ = ~settled
        rows, scores, limits, width = rows[open_], scores[open_], _Limits(*(x[open_] for x in limits)), width * 16


class _Limits(NamedTuple):
    """[R, 1] each."""

    top_k: Tensor  # int64; V: off
    top_p: Tensor  # float64; inf: off
    floor: Tensor  # float32, log(min_p); -inf: off

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "_Limits":
        top_k = torch.tensor([p.top_k or vocab_size for p in params], device=device)
        top_p = torch.tensor(
            [p.top_p if p.top_p < 1.0 else torch.inf for p in params], dtype=torch.float64, device=device
        )
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        return cls(top_k.clamp_(max=vocab_size).unsqueeze(1), top_p.unsqueeze(1), min_p.log_().unsqueeze(1))


def _cut(scores: Tensor, limits: _Limits, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, scores, keep) [R, width], ranked; `keep` is valid for complete rows."""
    tokens, ranked = _rank(scores, width)
    rank = torch.arange(width, device=scores.device)
    keep = (ranked >= limits.floor) & (ranked > -torch.inf) & (rank < limits.top_k)
    if bool((limits.top_p <= 1.0).any()):
        mass = ranked.to(torch.float64).exp_().masked_fill_(~keep, 0.0)
        before = mass.cumsum(1) - mass
        # top-p is a share of the mass of the top-k if set (all ranked here), else of all tokens above the floor
        total = torch.where(limits.top_k < scores.shape[1], mass.sum(1, keepdim=True), _mass(scores, limits.floor))
        keep &= before < limits.top_p * total
    return tokens, ranked, keep


def _rank(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best, best first, equal scores by id. `topk` decides which of several equal scores are included."""
    if width == scores.shape[1]:
        ranked, tokens = scores.sort(dim=1, descending=True, stable=True)
        return tokens, ranked
    tokens = scores.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    ranked, order = scores.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    return tokens.gather(1, order), ranked


def _mass(scores: Tensor, floor: Tensor) -> Tensor:
    """[R, 1] float64, the sum of exp(scores) above the floor."""
    return scores.exp().masked_fill_(scores < floor, 0.0).sum(1, keepdim=True, dtype=torch.float64)
