"""Log-probabilities of chosen tokens and of the best tokens of their rows, from raw logits, at temperature 1.

Scores are x - max x. Exponentials are added as integers, whose sum has no order, so that the bits of a row depend on the row
alone. Of equal scores, the lower id is the better one. The device returns sums, and `read_scores` takes their logarithms on the
host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.output import TokenLogprobs
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.sampling import FIXED_POINT

MAX_TOP = 20
"""Best tokens of a row."""
COLUMNS = 4 + 2 * MAX_TOP
"""Numbers of a scored row: the score of its token, the rank, the sum of exponentials in two parts, then the best tokens and
their scores."""
_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Key of an empty entry."""
_MOST = tl.constexpr(MAX_TOP)
_WIDTH = tl.constexpr(COLUMNS)
_POINT = tl.constexpr(FIXED_POINT)
_CHUNK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class ScoreScratch:
    """Scratch memory for N rows of V columns in C chunks."""

    maxima: Tensor  # [N, C] float32
    masses: Tensor  # [N, C] int64, sums of exponentials
    better: Tensor  # [N, C] int32, tokens better than the chosen one
    keys: Tensor  # [N, C, MAX_TOP] int64, best scores with their columns
    counters: Tensor  # [N] int32, finished chunks; zero between launches


def score_scratch(num_rows: int, vocab_size: int, device: torch.device) -> ScoreScratch:
    shape = num_rows, triton.cdiv(vocab_size, _CHUNK)
    return ScoreScratch(
        torch.empty(shape, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(*shape, MAX_TOP, dtype=torch.int64, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


def score_tokens(
    logits: Tensor,  # [R, V] float32, not modified
    rows: Tensor,  # [N] int64, the row of each token
    tokens: Tensor,  # [N] int64; -1: none
    num_top: Tensor,  # [S] int32, best tokens wanted of each row of a slot; -1: its tokens are not scored
    each: int,  # tokens of a slot
    scratch: ScoreScratch,
    out: Tensor,  # [N, COLUMNS] int32. What is not scored is left as it is
    slots: Tensor | None = None,  # [N / each] int64. None if they are 0, 1, ...
) -> None:
    count, width = len(tokens), logits.shape[1]
    assert logits.dtype is torch.float32
    assert logits.stride(1) == 1
    assert rows.is_contiguous()
    assert tokens.is_contiguous()
    assert out.is_contiguous()
    assert len(scratch.counters) >= count
    chunks = scratch.maxima.shape[1]
    assert chunks == triton.cdiv(width, _CHUNK)
    if not count:
        return
    given = logits, rows, tokens, num_top, slots, scratch.maxima
    sizes = logits.stride(0), each
    _row_maxima[(count, chunks)](*given, *sizes, V=width, CHUNKS=chunks, CHUNK=_CHUNK, num_warps=4, **PDL)
    _score[(count, chunks)](
        *given, scratch.masses, scratch.better, scratch.keys, scratch.counters, out, *sizes,
        V=width, CHUNKS=chunks, CHUNK=_CHUNK, PADDED=triton.next_power_of_2(chunks),
        BEST=triton.next_power_of_2(chunks * MAX_TOP), TOP=triton.next_power_of_2(MAX_TOP), num_warps=4, **PDL,
    )  # fmt: skip


def score_rows(logits: Tensor, chosen: Sequence[int], top_n: int) -> list[TokenLogprobs]:
    """Log-probabilities of one token of each row of logits [R, V], and of the `top_n` best. It waits for the device."""
    top_n = min(top_n, logits.shape[1])
    count, device = len(chosen), logits.device
    out = torch.empty(count, COLUMNS, dtype=torch.int32, device=device)
    num_top = torch.full((1,), top_n, dtype=torch.int32, device=device)
    tokens, rows = torch.tensor(chosen, dtype=torch.int64).to(device), torch.arange(count, device=device)
    scratch = score_scratch(count, logits.shape[1], device)
    score_tokens(logits.float(), rows, tokens, num_top, max(1, count), scratch, out)
    return read_scores(out.cpu().numpy(), chosen, top_n)


def read_scores(scored: np.ndarray[Any, Any], chosen: Sequence[int], top_n: int) -> list[TokenLogprobs]:
    """The log-probabilities of the first rows of `scored` [N, COLUMNS] int32, which `score_tokens` wrote for the tokens
    `chosen`. `top_n` is at most what was wanted, and the size of the vocabulary."""
    scored = scored[: len(chosen)]
    masses = np.ascontiguousarray(scored[:, 2:4]).view(np.int64)
    totals = np.log(masses.astype(np.float64) / FIXED_POINT).astype(np.float32)  # [N, 1]
    floats = scored.view(np.float32)
    best = scored[:, 4 : 4 + top_n].tolist()
    top = (floats[:, 4 + MAX_TOP : 4 + MAX_TOP + top_n] - totals).tolist()
    values, ranks = (floats[:, :1] - totals)[:, 0].tolist(), scored[:, 1].tolist()
    return [
        TokenLogprobs(token, value, tuple(zip(tokens, scores, strict=True)), rank)
        for token, value, tokens, scores, rank in zip(chosen, values, best, top, ranks, strict=True)
    ]


@triton.jit
def _num_top(tokens, num_top, slots, item, each):
    """Best tokens wanted of this row. -1 if it is not scored."""
    slot = (item // each).to(tl.int64)
    if slots is not None:
        slot = tl.load(slots + slot)
    return tl.where(tl.load(tokens + item) < 0, -1, tl.load(num_top + slot))


@triton.jit(
    do_not_specialize=["each"],
    do_not_specialize_on_alignment=["rows", "tokens", "num_top", "slots", "stride"],
)
def _row_maxima(
    logits, rows, tokens, num_top, slots, maxima, stride, each,
    V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    item, chunk = tl.program_id(0), tl.program_id(1)
    if _num_top(tokens, num_top, slots, item, each) < 0:
        return
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    line = logits + tl.load(rows + item) * stride
    x = tl.load(line + column, mask=column < V, other=float("-inf"))
    tl.store(maxima + item * CHUNKS + chunk, tl.max(x, 0))


@triton.jit(
    do_not_specialize=["each"],
    do_not_specialize_on_alignment=["rows", "tokens", "num_top", "slots", "stride"],
)
def _score(
    logits, rows, tokens, num_top, slots, maxima, masses, better, keys, counters, out, stride, each,
    V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr, BEST: tl.constexpr,
    TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    item, chunk = tl.program_id(0), tl.program_id(1)
    wanted = _num_top(tokens, num_top, slots, item, each)
    if wanted < 0:
        return
    count = tl.minimum(tl.minimum(wanted, _MOST), V)
    part, some = tl.arange(0, PADDED), tl.arange(0, BEST)
    line = logits + tl.load(rows + item) * stride
    most = tl.max(tl.load(maxima + item * CHUNKS + part, mask=part < CHUNKS, other=float("-inf")), 0)
    own = tl.load(line + tl.load(tokens + item)) - most
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    is_column = column < V
    score = tl.load(line + column, mask=is_column, other=float("-inf")) - most
    mass = tl.sum((tl.exp(score) * _POINT).to(tl.int64), 0)
    above = tl.sum(((score > own) & is_column).to(tl.int32), 0)
    key = tl.where(is_column, _key(score, column), _NONE)
    first = (item * CHUNKS + chunk).to(tl.int64) * _MOST
    for place in range(count):
        best = tl.max(key, 0)
        tl.store(keys + first + place, best)
        key = tl.where(key == best, _NONE, key)

    if CHUNKS > 1:
        tl.store(masses + item * CHUNKS + chunk, mass)
        tl.store(better + item * CHUNKS + chunk, above)
    tl.debug_barrier()  # all are stored before the counter is incremented
    if CHUNKS > 1:
        if tl.atomic_add(counters + item, 1, sem="acq_rel") != CHUNKS - 1:
            return
        tl.store(counters + item, 0)
        is_part = part < CHUNKS
        mass = tl.sum(tl.load(masses + item * CHUNKS + part, mask=is_part, other=0, cache_modifier=".cg"), 0)
        above = tl.sum(tl.load(better + item * CHUNKS + part, mask=is_part, other=0, cache_modifier=".cg"), 0)
    into = out + item.to(tl.int64) * _WIDTH
    tl.store(into, own.to(tl.int32, bitcast=True))
    tl.store(into + 1, above + 1)
    tl.store(into + 2, (mass & 0xFFFFFFFF).to(tl.int32))
    tl.store(into + 3, (mass >> 32).to(tl.int32))
    is_key = (some < CHUNKS * _MOST) & (some % _MOST < count)
    start = keys + item.to(tl.int64) * CHUNKS * _MOST
    key = tl.load(start + some, mask=is_key, other=_NONE, cache_modifier=".cg")
    for place in range(count):
        best = tl.max(key, 0)
        key = tl.where(key == best, _NONE, key)
        ordered = (best >> 32).to(tl.int32)
        tl.store(into + 4 + place, (0x7FFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32))
        tl.store(into + 4 + _MOST + place, ordered ^ ((ordered >> 31) & 0x7FFFFFFF))


@triton.jit
def _key(score, column):
    """int64 key: larger for a higher score, then for a lower column, as in `ranking.py`."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
