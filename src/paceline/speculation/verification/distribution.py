"""The distribution `p` of one row, and tokens chosen from it.

The order is fixed: logit bias, penalties, grammar mask, min_tokens; then temperature, min-p, top-k, top-p. A row's result does
not depend on which other rows are in the batch. Everything is float32 except the masses that top-p compares.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.output import TokenLogprobs
from paceline.kernels.sampling import SampledRow, arg_max, can_sample, sample
from paceline.speculation.verification.noise import Purpose, gumbel, gumbel_at, stream
from paceline.speculation.verification.processors import process
from paceline.speculation.verification.rows import RowContext
from paceline.speculation.verification.truncation import truncate


def pick(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """[R] int64: argmax(log p + G) with the shared noise of each row's position; greedy rows take the arg-max."""
    if all(row.params.is_greedy and not row.is_processed for row in rows):
        return arg_max(logits)
    scores = process(logits, rows)
    picks = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy, whole, truncated = _kinds(rows)
    if greedy:
        picks[greedy] = _select(scores, greedy).argmax(1)
    if can_sample(scores):
        sampled = sorted(whole + truncated)
        if sampled:
            picks[sampled] = sample(_select(scores, sampled), [sampled_row(rows[i]) for i in sampled])
        return picks
    if whole:
        chosen = [rows[i] for i in whole]
        noise = gumbel([row.key for row in chosen], Purpose.SHARED, logits.shape[1], logits.device)
        picks[whole] = noise.add_(_scale(_select(scores, whole), chosen)).argmax(1)
    if truncated:
        chosen = [rows[i] for i in truncated]
        picks[truncated] = _pick_truncated(_scale(_select(scores, truncated), chosen), chosen)
    return picks


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
    """Log-probabilities of the chosen tokens and of the `top_n` best under the model: raw logits, temperature 1."""
    values = logits.to(torch.float32).log_softmax(1)
    own = values.gather(1, torch.tensor(chosen, device=values.device).unsqueeze(1)).squeeze(1)
    ranks: list[int] = (1 + (values > own.unsqueeze(1)).sum(1)).tolist()
    best = values.topk(min(top_n, values.shape[1]), dim=1)
    return [
        TokenLogprobs(token, logprob, tuple(zip(tokens, scores, strict=True)), rank)
        for token, logprob, tokens, scores, rank in zip(
            chosen, own.tolist(), best.indices.tolist(), best.values.tolist(), ranks, strict=True
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
