"""The most likely next tokens of each row and their probabilities: the branches of a tree.

A row is divided into chunks of columns as in `pick.py`. Each program stores its best tokens and its part of the softmax; the
program that finishes last combines them. Score and column are packed in one key, so that one reduction finds the best score
with the lowest column.
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
"""Key of an empty entry."""

RankKind = Literal["greedy", "sampled", "ranked"]
"""Scores of a row. `greedy` takes the logits, `sampled` takes logits / T + G. `ranked` takes logits that were scaled and
truncated before, with columns of their own per row, plus G."""


@dataclass(frozen=True, slots=True, eq=False)
class RankScratch:
    """Scratch memory for up to R rows of V columns in C chunks, and K branches."""

    chunk: int
    tops: Tensor  # [R, C] float32, best score of each chunk
    sums: Tensor  # [R, C] float32, sum of exp(score - top)
    keys: Tensor  # [R, C, K] int64, best keys of each chunk
    counters: Tensor  # [R] int32, finished chunks; zero between launches


@dataclass(frozen=True, slots=True, eq=False)
class RankedTokens:
    tokens: Tensor  # [R, K] int64, token ids of the target, best first
    confidence: Tensor  # [R, K] float32, log probability; -inf: impossible


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
    ids: Tensor | None,  # [V] int64, token of each column; [R, V] if "ranked". None if it is the number of the column
    kind: RankKind,
    temperature: Tensor,  # [S] float32, for R / S rows each; 0: greedy
    streams: Tensor,  # [S] int64
    lengths: Tensor,  # [S] int32
    level: int,  # the token is at position length + level
    scratch: RankScratch,
) -> RankedTokens:
    """The K best tokens of each row; `scratch` determines K."""
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
        scratch.counters,
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
    return RankedTokens(tokens, confidence)


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
    counters,
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
        row_temperature = tl.load(temperature + row // EACH)
        if row_temperature > 0.0:
            token = column
            if MAPPED:
                token = tl.load(lookup + column, mask=is_kept, other=0).to(tl.int32)
            if KIND == "sampled":
                score = score / row_temperature
            stream = tl.load(streams + row // EACH).to(tl.uint64, bitcast=True)
            position = (tl.load(lengths + row // EACH) + level).to(tl.uint64)
            score += gumbel(noise_bits(stream, position, token))
    score = tl.where(is_kept, score, float("-inf"))
    top = tl.max(score, 0)
    zero = tl.where(top == float("-inf"), 0.0, top)  # avoids -inf - -inf
    tl.store(tops + row * CHUNKS + chunk, top)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.exp(score - zero), 0))
    at = (row * CHUNKS + chunk) * COUNT
    key = tl.where(is_kept, _key(score, column), _NONE)
    for place in tl.static_range(COUNT):
        best = tl.max(key, 0)
        tl.store(keys + at + place, best)
        key = tl.where(key == best, _NONE, key)

    tl.debug_barrier()  # all results are stored before the counter is incremented
    if CHUNKS > 1:
        if tl.atomic_add(counters + row, 1, sem="acq_rel") != CHUNKS - 1:
            return
        tl.store(counters + row, 0)
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
        winner = tl.minimum(0x7FFFFFFF - (best & 0xFFFFFFFF), V - 1)  # all-NaN rows still give valid tokens
        score = _score(best)
        if MAPPED:
            winner = tl.load(lookup + winner)
        tl.store(tokens + row * COUNT + place, winner)
        tl.store(confidence + row * COUNT + place, score - whole)


@triton.jit
def _key(score, column):
    """int64 key: larger for a higher score, then for a lower column. The bits of negative floats are inverted, because as
    integers they sort in reverse."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _score(key):
    ordered = (key >> 32).to(tl.int32)
    score = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == _NONE, float("-inf"), score)
