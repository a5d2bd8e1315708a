"""The likeliest next tokens of each row, and their probabilities: the branches of a tree.

A row is cut into chunks of columns as in `pick.py`; each leaves its best few and its share of the softmax, and the last to
finish joins them. Equal scores fall to the lower column: both are one number, so that the best is one reduction away.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.speculation.noise import gumbel, noise_bits

_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""The key of nothing."""

RankKind = Literal["greedy", "sampled", "ranked"]
"""Scores are the logits; logits / T + G; or were scaled and cut before, to columns of their own for each row, and get G."""


@dataclass(frozen=True, slots=True, eq=False)
class RankScratch:
    """For at most R rows of V columns, C chunks each, K branches."""

    chunk: int
    tops: Tensor  # [R, C] float32, the best score of each chunk
    sums: Tensor  # [R, C] float32, of exp(score - top)
    keys: Tensor  # [R, C, K] int64, the best of each chunk, score and column in one
    arrived: Tensor  # [R] int32, zero between launches


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    tokens: Tensor  # [R, K] int64, the target's ids, best first
    confidence: Tensor  # [R, K] float32, log; -inf: impossible


def rank_scratch(num_rows: int, num_columns: int, count: int, device: torch.device | str) -> RankScratch:
    chunk = min(1024 if num_rows <= 16 else 4096, triton.next_power_of_2(num_columns))
    shape = (num_rows, triton.cdiv(num_columns, chunk))
    return RankScratch(
        chunk,
        torch.empty(shape, device=device),
        torch.empty(shape, device=device),
        torch.empty(*shape, count, dtype=torch.int64, device=device),
        torch.zeros(num_rows, dtype=torch.int32, device=device),
    )


def rank_rows(
    logits: Tensor,  # [R, V] float32, bfloat16 or float16
    ids: Tensor | None,  # [V] int64, the token of each column; [R, V] if "ranked"; None: its number
    kind: RankKind,
    temperature: Tensor,  # [S] float32, of R / S rows each; 0: greedy
    streams: Tensor,  # [S] int64
    lengths: Tensor,  # [S] int32
    level: int,  # the token lies at position length + level
    scratch: RankScratch,
) -> Branches:
    """The K best of each row, K as `scratch` has it."""
    rows, width = logits.shape
    chunks, count = scratch.keys.shape[1:]
    assert logits.stride(1) == 1
    assert chunks == triton.cdiv(width, scratch.chunk)
    assert kind != "ranked" or (ids is not None and ids.stride() == logits.stride())
    assert count <= width
    tokens = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    confidence = torch.empty(rows, count, device=logits.device)
    _rank[(rows, chunks)](
        logits,
        logits if ids is None else ids,
        temperature,
        streams,
        lengths,
        scratch.tops,
        scratch.sums,
        scratch.keys,
        scratch.arrived,
        tokens,
        confidence,
        logits.stride(0),
        level,
        KIND=kind,
        MAPPED=ids is not None,
        EACH=rows // len(lengths),
        V=width,
        COUNT=count,
        CHUNKS=chunks,
        CHUNK=scratch.chunk,
        PADDED=triton.next_power_of_2(chunks),
        BEST=triton.next_power_of_2(chunks * count),
        num_warps=max(1, scratch.chunk // 512),
        **PDL,
    )
    return Branches(tokens, confidence)


@triton.jit(do_not_specialize=["level"])
def _rank(
    logits,
    ids,
    temperature,
    streams,
    lengths,
    tops,
    sums,
    keys,
    arrived,
    tokens,
    confidence,
    stride,
    level,
    KIND: tl.constexpr,
    MAPPED: tl.constexpr,
    EACH: tl.constexpr,
    V: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    BEST: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    line = row.to(tl.int64) * stride
    lookup = ids + line if KIND == "ranked" else ids
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    is_kept = column < V
    score = tl.load(logits + line + column, mask=is_kept, other=float("-inf")).to(tl.float32)
    if KIND != "greedy":
        heat = tl.load(temperature + row // EACH)
        if heat > 0.0:
            token = column
            if MAPPED:
                token = tl.load(lookup + column, mask=is_kept, other=0).to(tl.int32)
            if KIND == "sampled":
                score = score / heat
            stream = tl.load(streams + row // EACH).to(tl.uint64, bitcast=True)
            position = (tl.load(lengths + row // EACH) + level).to(tl.uint64)
            score += gumbel(noise_bits(stream, position, token))
    score = tl.where(is_kept, score, float("-inf"))
    top = tl.max(score, 0)
    zero = tl.where(top == float("-inf"), 0.0, top)  # no -inf - -inf
    tl.store(tops + row * CHUNKS + chunk, top)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.exp(score - zero), 0))
    at = (row * CHUNKS + chunk) * COUNT
    key = tl.where(is_kept, _key(score, column), _NONE)
    for place in tl.static_range(COUNT):
        best = tl.max(key, 0)
        tl.store(keys + at + place, best)
        key = tl.where(key == best, _NONE, key)

    tl.debug_barrier()  # all is stored before the count says so
    if CHUNKS > 1:
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") != CHUNKS - 1:
            return
        tl.store(arrived + row, 0)
    each, some = tl.arange(0, PADDED), tl.arange(0, BEST)
    tops_here = tl.load(tops + row * CHUNKS + each, mask=each < CHUNKS, other=float("-inf"), cache_modifier=".cg")
    sums_here = tl.load(sums + row * CHUNKS + each, mask=each < CHUNKS, other=0.0, cache_modifier=".cg")
    top = tl.max(tops_here, 0)
    zero = tl.where(top == float("-inf"), 0.0, top)
    whole = zero + tl.log(tl.sum(sums_here * tl.exp(tops_here - zero), 0))
    key = tl.load(keys + row * CHUNKS * COUNT + some, mask=some < CHUNKS * COUNT, other=_NONE, cache_modifier=".cg")
    for place in tl.static_range(COUNT):
        best = tl.max(key, 0)
        key = tl.where(key == best, _NONE, key)
        winner = tl.minimum(0x7FFFFFFF - (best & 0xFFFFFFFF), V - 1)  # rows that are all NaN still give tokens
        score = _score(best)
        if MAPPED:
            winner = tl.load(lookup + winner)
        tl.store(tokens + row * COUNT + place, winner)
        tl.store(confidence + row * COUNT + place, score - whole)


@triton.jit
def _key(score, column):
    """int64, larger for a higher score, then for a lower column. Negative floats order the wrong way round as integers."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _score(key):
    ordered = (key >> 32).to(tl.int32)
    score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == _NONE, float("-inf"), score)
