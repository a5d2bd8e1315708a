"""Samples tokens after min-p, then top-k, then top-p, as `speculation/distribution/distribution.py` defines them.

Nothing is sorted. The tokens that a row keeps are a prefix of its ranking, by score and then by lower id. The winner among all
tokens, with noise, is taken if its rank and the mass before it are within the limits. If not, no token ranked after it is kept
either: the next winner comes from those before it. Most first winners are taken.

Masses are whole numbers of 2^-40, whose sum has no order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.speculation.noise import gumbel, noise_bits

_BLOCK = 4096
_MOST_BLOCKS = 255
"""A lane counts in 8 bits how many of its columns are in each of eight ranges."""
_UNIT = tl.constexpr(1 << 40)
_LAST = tl.constexpr(1 << 40)
"""Above every key."""


def pick_truncated(
    logits: Tensor,  # [R, V]
    temperature: Tensor,  # [R] float32, 0: greedy
    streams: Tensor,  # [R] int64
    positions: Tensor,  # [R] int64
    top_k: Tensor,  # [R] int64, 0: off
    top_p: Tensor,  # [R] float64, 1: off
    min_p: Tensor,  # [R] float32, 0: off
    out: Tensor | None = None,
) -> Tensor:
    """[R] int64: tokens sampled after min-p, then top-k, then top-p. Rows without truncation, greedy rows included, give the
    same token as `pick`."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert vocab_size <= _BLOCK * _MOST_BLOCKS
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    _pick[(rows,)](
        logits, temperature, streams, positions, top_k, top_p, min_p.log(), out, logits.stride(0), vocab_size,
        BLOCK=_BLOCK, num_warps=16, **PDL,
    )  # fmt: skip
    return out


@triton.jit
def _scores(line, column, V, best, divisor):
    """(scores, keys): a key is smaller for a higher score, and -inf is no smaller than any. Scores are at most 0."""
    is_column = column < V
    x = tl.load(line + column, mask=is_column, other=float("-inf")).to(tl.float32)
    # IEEE division, as in torch: Triton's default has an error of up to two units in the last place
    score = tl.div_rn(x - best, tl.full(column.shape, 1.0, tl.float32) * divisor)
    return score, (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _mass(score, floor):
    return tl.where(score >= floor, (tl.exp(score) * _UNIT).to(tl.int64), 0)


@triton.jit
def _kth_key(line, V, best, divisor, count, BLOCK: tl.constexpr):
    """(key, number of smaller keys): `count` keys are not larger than this one, or more of them if the last are equal. The key
    may also be one that no token has. Three bits a pass, the highest first."""
    lane = tl.arange(0, BLOCK)
    prefix, before, is_found = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    shift = tl.full([], 30, tl.int32)
    while (shift >= 0) & (is_found == 0):
        packed = tl.zeros([BLOCK], tl.int64)
        for start in range(0, V, BLOCK):
            _, key = _scores(line, start + lane, V, best, divisor)
            is_inside = (start + lane < V) & ((key >> (shift + 3)) == (prefix >> (shift + 3)))
            digit = (key >> shift) & 7
            packed += tl.where(is_inside, tl.full([BLOCK], 1, tl.int64) << (digit * 8), 0)
        digit = tl.full([], 0, tl.int64)
        inside = tl.sum(packed & 255, 0)
        for each in range(1, 8):
            is_past = (digit == each - 1) & (before + inside < count)
            before = tl.where(is_past, before + inside, before)
            digit = tl.where(is_past, each, digit)
            inside = tl.where(is_past, tl.sum((packed >> (8 * each)) & 255, 0), inside)
        prefix += digit << shift
        if before + inside == count:  # all that begin like this
            before = before + inside
            prefix += (tl.full([], 1, tl.int64) << shift) - 1
            is_found += 1
        shift -= 3
    return prefix, before


@triton.jit(do_not_specialize=["V"])
def _pick(
    logits, temperature, streams, positions, top_k, top_p, floors, out, stride, V, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    row_temperature, floor = tl.load(temperature + row), tl.load(floors + row)
    share, limit = tl.load(top_p + row), tl.load(top_k + row)
    limit = tl.where((limit > 0) & (limit < V), limit, V)
    stream = tl.load(streams + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    divisor = tl.where(row_temperature > 0.0, row_temperature, 1.0)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        column = start + lane
        largest = tl.maximum(largest, tl.load(line + column, mask=column < V, other=float("-inf")).to(tl.float32))
    best = tl.max(largest, 0)

    # top-p is a share of the top-k if there is one, otherwise of all tokens above the floor
    total = tl.full([], 0, tl.int64)
    if share < 1.0:
        last, before = tl.full([], _LAST, tl.int64), limit
        if limit < V:
            last, before = _kth_key(line, V, best, divisor, limit, BLOCK)
        masses, tied = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for start in range(0, V, BLOCK):
            score, key = _scores(line, start + lane, V, best, divisor)
            mass = _mass(score, floor)
            masses += tl.where((key < last) | ((key == last) & (before >= limit)), mass, 0)
            tied = tl.maximum(tied, tl.where(key == last, mass, 0))
        total = tl.sum(masses, 0) + (limit - before) * tl.max(tied, 0)

    chosen, bound, bound_id = tl.full([], -1, tl.int32), tl.full([], _LAST, tl.int64), V
    while chosen < 0:
        highest, ids = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        for start in range(0, V, BLOCK):
            column = start + lane
            score, key = _scores(line, column, V, best, divisor)
            is_candidate = (column < V) & (score >= floor) & ((key < bound) | ((key == bound) & (column < bound_id)))
            if row_temperature > 0.0:
                score += gumbel(noise_bits(stream, position, column))
            score = tl.where(is_candidate, score, float("-inf"))
            is_higher = score > highest
            highest, ids = tl.where(is_higher, score, highest), tl.where(is_higher, column, ids)
        winner_score = tl.max(highest, 0)
        winner = tl.minimum(tl.min(tl.where(highest == winner_score, ids, 0x7FFFFFFF), 0), V - 1)

        x = tl.load(line + winner).to(tl.float32)
        own = tl.div_rn(x - best, 1.0 * divisor)
        own_key = (own.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
        masses, ranks = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for start in range(0, V, BLOCK):
            column = start + lane
            score, key = _scores(line, column, V, best, divisor)
            is_before = (column < V) & ((key < own_key) | ((key == own_key) & (column < winner)))
            ranks += is_before.to(tl.int64)
            masses += tl.where(is_before, _mass(score, floor), 0)
        is_within = (share >= 1.0) | (tl.sum(masses, 0).to(tl.float64) < share * total.to(tl.float64))
        is_kept = ((tl.sum(ranks, 0) < limit) & is_within) | (
            winner_score == float("-inf")
        )  # NaN logits give a token too
        chosen = tl.where(is_kept, winner, -1)
        bound, bound_id = own_key, winner
    tl.store(out + row, chosen.to(tl.int64))
