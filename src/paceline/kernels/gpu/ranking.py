"""The likeliest next tokens of each row and how likely they are: branches of a tree, ranked as `speculation/ranking.py` does.

A row is cut into chunks of columns as in `pick.py`; each leaves its best few and its share of the softmax, and the last to
finish joins them. Equal scores fall to the lower column.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.noise import gumbel, noise_bits

RankKind = Literal["greedy", "sampled", "ranked"]
"""Scores are the logits; logits / T + G; or were scaled and cut before, to columns of their own for each row, and get G."""


@dataclass(frozen=True, slots=True, eq=False)
class RankScratch:
    """For at most R rows of V columns, C chunks each, K branches."""

    chunk: int
    tops: Tensor  # [R, C] float32, the best score of each chunk
    sums: Tensor  # [R, C] float32, of exp(score - top)
    scores: Tensor  # [R, C, K] float32, the best of each chunk
    columns: Tensor  # [R, C, K] int32
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
        torch.empty(*shape, count, device=device),
        torch.empty(*shape, count, dtype=torch.int32, device=device),
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
    chunks, count = scratch.scores.shape[1:]
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
        scratch.scores,
        scratch.columns,
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
        num_warps=4,
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
    scores,
    columns,
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
    for place in tl.static_range(COUNT):
        best = tl.max(tl.where(is_kept, score, float("-inf")), 0)
        winner = tl.min(tl.where(is_kept & (score == best), column, V), 0)  # V: there is none left
        tl.store(scores + at + place, best)
        tl.store(columns + at + place, winner)
        is_kept &= column != winner

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
    at = row * CHUNKS * COUNT
    is_one = some < CHUNKS * COUNT
    score = tl.load(scores + at + some, mask=is_one, other=float("-inf"), cache_modifier=".cg")
    column = tl.load(columns + at + some, mask=is_one, other=V, cache_modifier=".cg")
    is_one &= column < V
    for place in tl.static_range(COUNT):
        best = tl.max(tl.where(is_one, score, float("-inf")), 0)
        winner = tl.min(tl.where(is_one & (score == best), column, V), 0)
        is_one &= column != winner
        winner = tl.minimum(winner, V - 1).to(tl.int64)  # rows that are all NaN still give tokens
        if MAPPED:
            winner = tl.load(lookup + winner)
        tl.store(tokens + row * COUNT + place, winner)
        tl.store(confidence + row * COUNT + place, best - whole)
