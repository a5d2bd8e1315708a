"""Tokens drawn from rows of logits, their largest values, and the best tokens of a draft, by one native call each."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.kernels.cpu import native
from paceline.kernels.formats.sampling import log_min_p

FIXED_POINT = 2.0**44
"""Exponentials up to 1 as integers, whose sum has no order. What is cut off of the 2^18 tokens of a large vocabulary is below
the last bit of float32, and the sum of 2^19 of them fits 64 bits."""
MAX_RANKED = 64
"""`MOST` in cpu/sampling.c."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Parameters of a row that is not greedy, and the key of its noise."""

    params: SamplingParams
    stream: int
    position: int


def can_sample(logits: Tensor) -> bool:
    """Whether `sample` and `rank_sampled` accept these logits."""
    return native.supports(logits) and logits.is_contiguous()


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """[R] int64 from logits [R, V]: the argmax of score and noise among the tokens that the parameters keep."""
    picks = torch.empty(len(rows), dtype=torch.int64)
    _call(logits, rows, [picks.data_ptr(), None, None, None, None], 0)
    return picks


def rank_sampled(
    logits: Tensor, rows: Sequence[SampledRow], is_noisy: Sequence[bool], ids: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """Returns (columns, log confidence) [R, count] of the best tokens, best first. A confidence is -inf where the parameters
    keep fewer tokens. `is_noisy` ranks by score and noise. `ids` [V'] has the token of each column. None if it is the number of
    the column."""
    assert count <= MAX_RANKED
    noisy = array("i", is_noisy)
    columns, confidences = torch.empty(len(rows), count, dtype=torch.int64), torch.empty(len(rows), count)
    outputs = [
        None if ids is None else ids.data_ptr(),
        noisy.buffer_info()[0],
        columns.data_ptr(),
        confidences.data_ptr(),
    ]
    _call(logits, rows, [None, *outputs], count)
    return columns, confidences


def _call(logits: Tensor, rows: Sequence[SampledRow], outputs: Sequence[int | None], count: int) -> None:
    loaded, width = native.library(), logits.shape[1]
    assert loaded is not None
    params = [row.params for row in rows]
    inputs = (  # arrays: a tensor takes longer to create than its values
        array("f", [row_params.temperature for row_params in params]),
        array("f", [log_min_p(row_params) for row_params in params]),
        array("d", [row_params.top_p if row_params.top_p < 1.0 else math.inf for row_params in params]),
        array("q", [min(row_params.top_k or width, width) for row_params in params]),
        array("Q", [row.stream for row in rows]),
        array("q", [row.position for row in rows]),
    )
    addresses = (values.buffer_info()[0] for values in inputs)
    loaded.for_rows(len(rows)).paceline_sample(logits.data_ptr(), *addresses, *outputs, len(rows), width, count)


def arg_max(scores: Tensor) -> Tensor:
    """[R] int64 from [R, V]: the first column with the largest value of each row."""
    if not native.supports(scores) or not scores.is_contiguous():
        return scores.argmax(1)
    columns = torch.empty(len(scores), dtype=torch.int64)
    _top(scores, columns, None, None, 1)
    return columns


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(columns, values) from [R, V]: the `count` largest values of each row, largest first, [R, count] each."""
    count = min(count, scores.shape[1])
    if not native.supports(scores) or not scores.is_contiguous():
        values, columns = scores.topk(count, dim=1)
        return columns, values
    columns, values = torch.empty(len(scores), count, dtype=torch.int64), torch.empty(len(scores), count)
    _top(scores, columns, values.data_ptr(), None, count)
    return columns, values


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


def top_with_exact_total(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `top_with_total`, for rows whose largest value is 0. The bits of a row depend on no other row, on any device: equal
    values are ranked by column, and where the device chooses the order of a sum, integers are summed."""
    if native.supports(scores) and scores.is_contiguous():
        return top_with_total(scores, count)
    width = scores.shape[1]
    columns = torch.arange(width - 1, -1, -1, device=scores.device)
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0 ranks as 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32 | columns
    best = keys.topk(min(count, width), dim=1).values
    chosen = width - 1 - (best & 0xFFFFFFFF)
    masses = (scores.exp() * FIXED_POINT).to(torch.int64).sum(1, keepdim=True)
    totals = (masses.to(torch.float64) / FIXED_POINT).log().to(torch.float32)
    return chosen, scores.gather(1, chosen), totals


def _top(scores: Tensor, columns: Tensor, values: int | None, totals: int | None, count: int) -> None:
    rows, width = scores.shape
    native.library().for_rows(rows).paceline_top(  # type: ignore[union-attr]  # supports() checked it
        scores.data_ptr(), columns.data_ptr(), values, totals, rows, width, count
    )
