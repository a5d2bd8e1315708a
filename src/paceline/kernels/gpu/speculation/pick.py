"""Samples tokens from logits: argmax((x - max x) / T + G), as `speculation/distribution/distribution.py` defines it.

A row is divided into chunks of columns, so that a single row fills the device. The program that finishes last compares the
chunks. Of equal scores, the lower id wins.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.speculation.noise import gumbel, noise_bits


@dataclass(frozen=True, slots=True, eq=False)
class PickScratch:
    """Scratch memory for up to R rows of V columns in C chunks."""

    chunk: int
    maxima: Tensor  # [R, C] float32, largest logit of each chunk
    scores: Tensor  # [R, C] float32, best score of each chunk
    orders: Tensor  # [R, C] int32, tie-breaking order of the best score
    counters: Tensor  # [R] int32, finished chunks; zero between launches


def pick_scratch(num_rows: int, vocab_size: int, device: torch.device | str) -> PickScratch:
    chunk = 1024 if num_rows <= 16 else 4096
    shape = (num_rows, triton.cdiv(vocab_size, chunk))
    return PickScratch(
        chunk,
        torch.empty(shape, device=device),
        torch.empty(shape, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


def pick(
    logits: Tensor,  # [R, V] float32, bfloat16 or float16
    temperature: Tensor,  # [R] float32, 0: greedy
    streams: Tensor,  # [R] int64, purpose, seed and choice mixed to 64 bits
    positions: Tensor,  # [R] int64, absolute position of the token to sample
    scratch: PickScratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[R] int64: the sampled tokens. Two launches: the scores of a row depend on its maximum."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    scratch = pick_scratch(rows, vocab_size, logits.device) if scratch is None else scratch
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    chunks = triton.cdiv(vocab_size, scratch.chunk)
    _maxima[(rows, chunks)](
        logits, scratch.maxima, logits.stride(0), V=vocab_size, CHUNKS=chunks, CHUNK=scratch.chunk,
        num_warps=4, **PDL,
    )  # fmt: skip
    _launch(logits, temperature, streams, positions, scratch, out, is_greedy=False)
    return out


def pick_greedy(logits: Tensor, scratch: PickScratch | None = None, out: Tensor | None = None) -> Tensor:
    """[R] int64: the argmax of each row of logits [R, V]; of equal ones, the lower id. One launch."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    scratch = pick_scratch(rows, vocab_size, logits.device) if scratch is None else scratch
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    _launch(logits, logits, logits, logits, scratch, out, is_greedy=True)
    return out


def _launch(
    logits: Tensor,
    temperature: Tensor,
    streams: Tensor,
    positions: Tensor,
    scratch: PickScratch,
    out: Tensor,
    is_greedy: bool,
) -> None:
    rows, vocab_size = logits.shape
    assert len(scratch.counters) >= rows
    assert scratch.scores.shape[1] == triton.cdiv(vocab_size, scratch.chunk)
    chunks = scratch.scores.shape[1]
    _pick[(rows, chunks)](
        logits,
        temperature,
        streams,
        positions,
        scratch.maxima,
        scratch.scores,
        scratch.orders,
        scratch.counters,
        out,
        logits.stride(0),
        GREEDY=is_greedy,
        V=vocab_size,
        CHUNKS=chunks,
        PADDED=triton.next_power_of_2(chunks),
        CHUNK=scratch.chunk,
        num_warps=4,
        **PDL,
    )


@triton.jit
def _maxima(
    logits,
    maxima,
    stride,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
    tl.store(maxima + row * CHUNKS + chunk, tl.max(x, 0))


@triton.jit
def _pick(
    logits,
    temperature,
    streams,
    positions,
    maxima,
    scores,
    orders,
    counters,
    out,
    stride,
    GREEDY: tl.constexpr,
    V: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    each = tl.arange(0, PADDED)
    line = row.to(tl.int64) * stride
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    is_kept = column < V
    score = tl.load(logits + line + column, mask=is_kept, other=float("-inf")).to(tl.float32)
    if not GREEDY:
        row_temperature = tl.load(temperature + row)
        if row_temperature > 0.0:
            best = tl.max(tl.load(maxima + row * CHUNKS + each, mask=each < CHUNKS, other=float("-inf")), 0)
            # IEEE division, as in torch: Triton's default has an error of up to two units in the last place
            score = tl.div_rn(score - best, tl.full([CHUNK], 1.0, tl.float32) * row_temperature)
            stream = tl.load(streams + row).to(tl.uint64, bitcast=True)
            position = tl.load(positions + row).to(tl.uint64, bitcast=True)
            score += gumbel(noise_bits(stream, position, column))
    score = tl.where(is_kept, score, float("-inf"))
    best = tl.max(score, 0)
    first = tl.min(tl.where((score == best) & is_kept, column, 0x7FFFFFFF), 0)

    if CHUNKS > 1:
        tl.store(scores + row * CHUNKS + chunk, best)
        tl.store(orders + row * CHUNKS + chunk, first)
        tl.debug_barrier()  # both are stored before the counter is incremented
        if tl.atomic_add(counters + row, 1, sem="acq_rel") != CHUNKS - 1:
            return
        tl.store(counters + row, 0)
        is_chunk = each < CHUNKS
        score = tl.load(scores + row * CHUNKS + each, mask=is_chunk, other=float("-inf"), cache_modifier=".cg")
        order = tl.load(orders + row * CHUNKS + each, mask=is_chunk, other=0x7FFFFFFF, cache_modifier=".cg")
        best = tl.max(score, 0)
        first = tl.min(tl.where(score == best, order, 0x7FFFFFFF), 0)
    tl.store(out + row, tl.minimum(first, V - 1).to(tl.int64))  # all-NaN logits still give a valid token
