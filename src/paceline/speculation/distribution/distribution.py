"""The distribution `p` of one row, its truncation, and tokens chosen from it.

The order is fixed: logit bias, penalties, grammar mask, min_tokens; then temperature, min-p, top-k, top-p. A row's result does
not depend on which other rows are in the batch. Everything is float32 except the masses that top-p compares.

Truncation is min-p, then top-k, then top-p over the remaining tokens, in vLLM's order. Tokens are ranked by score, equal scores
by lower id, and a row keeps a prefix of that ranking. Ties at the boundary are therefore resolved alike on every path and in
every batch. Masses are summed in float64.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.output import TokenLogprobs
from paceline.core.request import SamplingParams
from paceline.kernels.formats.layout import uses_gpu_kernels
from paceline.kernels.sampling import SampledRow, arg_max, can_sample, sample, top_with_exact_total
from paceline.speculation.rows import Purpose, RowContext, gumbel, gumbel_at, process, stream

SCORED_ROWS = 16
"""Rows whose log-probabilities are computed together: a row of a large vocabulary takes some megabytes."""
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


def pick(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """[R] int64: argmax(log p + G) with the shared noise of each row's position; greedy rows take the arg-max."""
    if all(row.params.is_greedy and not row.is_processed for row in rows):
        return arg_max(logits)
    scores = process(logits, rows)
    picks = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy, whole, truncated = _kinds(rows)
    if greedy:
        picks[greedy] = _select(scores, greedy).argmax(1)
    sampled = sorted(whole + truncated)
    if not sampled:
        return picks
    if can_sample(scores):
        picks[sampled] = sample(_select(scores, sampled), [sampled_row(rows[i]) for i in sampled])
        return picks
    if uses_gpu_kernels(scores.device):
        picks[sampled] = _pick_on_gpu(_select(scores, sampled), [rows[i] for i in sampled])
        return picks
    if whole:
        chosen = [rows[i] for i in whole]
        noise = gumbel([row.key for row in chosen], Purpose.SHARED, logits.shape[1], logits.device)
        picks[whole] = noise.add_(_scale(_select(scores, whole), chosen)).argmax(1)
    if truncated:
        chosen = [rows[i] for i in truncated]
        picks[truncated] = _pick_truncated(_scale(_select(scores, truncated), chosen), chosen)
    return picks


def _pick_on_gpu(scores: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """By the kernel of graph steps, so that a token does not depend on which executor takes the step."""
    from paceline.kernels.gpu.speculation.pick_truncated import pick_truncated

    streams = [stream(Purpose.SHARED, row.seed, row.choice) for row in rows]
    columns = (
        torch.tensor([row.params.temperature for row in rows], dtype=torch.float32),
        torch.tensor([number - (1 << 64) if number >> 63 else number for number in streams]),
        torch.tensor([row.position for row in rows]),
        torch.tensor([row.params.top_k for row in rows]),
        torch.tensor([row.params.top_p for row in rows], dtype=torch.float64),
        torch.tensor([row.params.min_p for row in rows], dtype=torch.float32),
    )
    return pick_truncated(scores, *(column.to(scores.device, non_blocking=True) for column in columns))


def sampled_row(row: RowContext) -> SampledRow:
    """The row for native sampling, with the shared noise of its position."""
    return SampledRow(row.params, stream(Purpose.SHARED, row.seed, row.choice), row.position)


def log_distribution(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """[R, V] float32, log p; a greedy row is one-hot (0 and -inf)."""
    scores = process(logits, rows)
    result = torch.full(logits.shape, -torch.inf, device=logits.device)
    greedy, whole, truncated = _kinds(rows)
    if greedy:
        result[greedy, _select(scores, greedy).argmax(1)] = 0.0
    if whole:
        result[whole] = _scale(_select(scores, whole), [rows[i] for i in whole])
    if truncated:
        chosen = [rows[i] for i in truncated]
        index = torch.tensor(truncated, device=logits.device)
        for kept in truncate(_scale(_select(scores, truncated), chosen), [row.params for row in chosen]):
            result[index[kept.rows].unsqueeze(1), kept.tokens] = kept.scores
    # A one-hot row stays exactly one-hot: 0 - log(1) = 0
    return result.log_softmax(1)


def sample_draft(logits: Tensor, rows: Sequence[RowContext]) -> tuple[Tensor, Tensor]:
    """Tokens [R] drawn with draft noise, and the distributions `q` [R, V] that they were drawn from."""
    log_q = log_distribution(logits, rows)
    noise = gumbel([row.key for row in rows], Purpose.DRAFT, logits.shape[1], logits.device)
    return noise.add_(log_q).argmax(1), log_q.exp()


def logprobs(logits: Tensor, chosen: Sequence[int], top_n: int) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens and of the `top_n` best under the model: raw logits, temperature 1. Equal logits
    give equal bits, in every batch and for every `top_n`. On a GPU the kernel of graph steps computes them."""
    if uses_gpu_kernels(logits.device):
        from paceline.kernels.gpu.speculation.scores import score_rows

        return score_rows(logits, chosen, top_n)
    found: list[TokenLogprobs] = []
    for start in range(0, len(chosen), SCORED_ROWS):
        part = slice(start, start + SCORED_ROWS)
        found += _logprobs(logits[part], chosen[part], top_n)
    return found


def _logprobs(logits: Tensor, chosen: Sequence[int], top_n: int) -> list[TokenLogprobs]:
    scores = logits.to(torch.float32)
    scores = scores - scores.amax(1, keepdim=True)
    columns, best, totals = top_with_exact_total(scores, max(1, top_n))
    own = scores.gather(1, torch.tensor(chosen, device=scores.device).unsqueeze(1))
    ranks: list[int] = (1 + (scores > own).sum(1)).tolist()
    values, top = (own - totals).squeeze(1).tolist(), (best - totals)[:, :top_n]
    return [
        TokenLogprobs(token, logprob, tuple(zip(tokens, scores, strict=True)), rank)
        for token, logprob, tokens, scores, rank in zip(
            chosen, values, columns[:, :top_n].tolist(), top.tolist(), ranks, strict=True
        )
    ]


def _kinds(rows: Sequence[RowContext]) -> tuple[list[int], list[int], list[int]]:
    """Indices of the rows that are greedy, sampled from the whole vocabulary, and sampled after truncation."""
    kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
    for i, row in enumerate(rows):
        kinds[0 if row.params.is_greedy else 2 if row.is_truncated else 1].append(i)
    return kinds


def _select(scores: Tensor, index: list[int]) -> Tensor:
    return scores if len(index) == len(scores) else scores[index]


def _scale(scores: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """(x - max x) / T: the maximum becomes 0, so that adding noise loses no precision at low temperature."""
    temperature = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=scores.device)
    return (scores - scores.amax(1, keepdim=True)).div_(temperature.unsqueeze(1))


def _pick_truncated(scores: Tensor, rows: Sequence[RowContext]) -> Tensor:
    picks = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    for kept in truncate(scores, [row.params for row in rows]):
        noise = gumbel_at([rows[i].key for i in kept.rows.tolist()], Purpose.SHARED, kept.tokens)
        best = noise.add_(kept.scores).argmax(1, keepdim=True)
        picks[kept.rows] = kept.tokens.gather(1, best).squeeze(1)
    return picks
