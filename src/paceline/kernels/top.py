"""The largest values of a row: the pick of a greedy row, and the best tokens of a draft."""

import torch
from torch import Tensor

from paceline.kernels.cpu import native


def arg_max(scores: Tensor) -> Tensor:
    """[R] int64 from [R, V]: the first column with the largest value of each row."""
    if not native.supports(scores) or not scores.is_contiguous():
        return scores.argmax(1)
    columns = torch.empty(len(scores), dtype=torch.int64)
    _top(scores, columns, None, None, 1)
    return columns


def top_with_total(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(columns, values, totals) from [R, V]: the `count` largest values, largest first, [R, count] each, and the logarithm of
    each row's sum of exponentials [R, 1]."""
    rows, width = scores.shape
    count = min(count, width)
    if not native.supports(scores) or not scores.is_contiguous():
        values, columns = scores.topk(count, dim=1)
        return columns, values, scores.logsumexp(1, keepdim=True)
    columns, values = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count)
    totals = torch.empty(rows, 1)
    _top(scores, columns, values.data_ptr(), totals.data_ptr(), count)
    return columns, values, totals


def _top(scores: Tensor, columns: Tensor, values: int | None, totals: int | None, count: int) -> None:
    rows, width = scores.shape
    native.library().for_rows(rows).paceline_top(  # type: ignore[union-attr]  # supports() checked it
        scores.data_ptr(), columns.data_ptr(), values, totals, rows, width, count
    )
