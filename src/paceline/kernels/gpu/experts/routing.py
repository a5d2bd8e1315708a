"""The experts of each row, and pairs of row and expert in blocks of one expert, without a wait of the host.

    route   the experts of each row and their weights
    sort    pairs by expert, and blocks of up to `block_rows` pairs of one expert

The number of blocks depends on the routing. A launch has as many programs as there can be blocks, and programs without a block
end at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.formats.experts import Routing
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_SORTED_AT_ONCE = 1024
"""Most pairs that `_sort` places; a program compares its own with all."""
_PART = 32
"""Pairs and blocks that one program of `_sort` places."""


@dataclass(frozen=True, slots=True, eq=False)
class PairBlocks:
    """Pairs sorted by expert and then by row, in blocks. Blocks that do not exist have no pairs."""

    order: Tensor  # [T k] int32, the pair in each place
    experts: Tensor  # [B] int32
    begins: Tensor  # [B] int32, the place of a block's first pair
    ends: Tensor  # [B] int32

    @property
    def count(self) -> int:
        return len(self.experts)


def route(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> ids [T, k] int32 and weights [T, k] float32 of each row's experts."""
    rows, num_experts = logits.shape
    ids = torch.empty(rows, routing.per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.per_token, dtype=torch.float32, device=logits.device)
    _route[(rows,)](
        logits, ids, weights, choice_bias, routing.scale, EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts),
        PER_TOKEN=routing.per_token, SLOTS=triton.next_power_of_2(routing.per_token), NORMALIZED=routing.is_normalized,
        SIGMOID=routing.scoring == "sigmoid", BIAS=choice_bias is not None, GROUPS=routing.num_groups,
        KEPT=routing.kept_groups, GROUP_SLOTS=triton.next_power_of_2(routing.num_groups), num_warps=1, **PDL,
    )  # fmt: skip
    return ids, weights


def most_blocks(pairs: int, num_experts: int, block_rows: int) -> int:
    """Most blocks that `pairs` pairs can have: every block but the last of each expert is full."""
    return min(pairs, num_experts + pairs // block_rows)


def sort_pairs(ids: Tensor, num_experts: int, block_rows: int) -> PairBlocks:
    """ids [T, k] -> their pairs in blocks."""
    pairs, device = ids.numel(), ids.device
    if pairs > _SORTED_AT_ONCE:
        return _sort_many(ids, num_experts, block_rows)
    count = most_blocks(pairs, num_experts, block_rows)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    experts, begins, ends = torch.empty(3, count, dtype=torch.int32, device=device)
    _sort[(triton.cdiv(pairs, _PART),)](  # there are no more blocks than pairs
        ids, order, experts, begins, ends, pairs, count,
        EXPERTS=num_experts, SLOTS=triton.next_power_of_2(num_experts), ROWS=block_rows, PART=_PART, num_warps=4, **PDL,
    )  # fmt: skip
    return PairBlocks(order, experts, begins, ends)


def _sort_many(ids: Tensor, num_experts: int, block_rows: int) -> PairBlocks:
    values, order = ids.view(-1).sort(stable=True)
    edges = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    starts = torch.searchsorted(values, edges, out_int32=True)
    blocks = (starts.diff() + block_rows - 1) // block_rows  # of each expert
    last = blocks.cumsum(0)
    number = torch.arange(most_blocks(ids.numel(), num_experts, block_rows), device=ids.device)
    experts = torch.searchsorted(last, number, right=True).clamp_(max=num_experts - 1)
    begins = starts[experts] + (number - (last - blocks)[experts]) * block_rows
    # A block that does not exist begins at the end of the last expert, or after it
    ends = torch.minimum(begins + block_rows, starts[experts + 1])
    return PairBlocks(*(tensor.to(torch.int32) for tensor in (order, experts, begins, ends)))


@triton.jit
def _route(
    logits_ptr, id_ptr, weight_ptr, bias_ptr, scale,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    GROUP_SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
    scores = logits
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        best = tl.max(logits, 0)
        total = tl.sum(tl.exp(logits - best), 0)
    choices = scores
    if BIAS:
        choices += tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0)
    is_free = expert < EXPERTS
    if GROUPS > 1:
        is_free &= _of_best_groups(choices, expert, EXPERTS // GROUPS, BLOCK, GROUPS, KEPT, GROUP_SLOTS, BIAS)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    for i in tl.static_range(PER_TOKEN):
        largest = tl.max(tl.where(is_free, choices, float("-inf")), 0)
        chosen = tl.min(tl.where(is_free & (choices == largest), expert, BLOCK), 0)  # the first of equal ones
        is_free &= expert != chosen
        ids = tl.where(slot == i, chosen, ids)
        score = tl.sum(tl.where(expert == chosen, scores, 0.0), 0)
        if not SIGMOID:
            score = tl.exp(score - best)
        weights = tl.where(slot == i, score, weights)
    if SIGMOID:
        total = tl.sum(weights, 0) + 1e-20 if NORMALIZED else 1.0
    elif NORMALIZED:
        total = tl.sum(weights, 0)
    at = row * PER_TOKEN + slot
    tl.store(id_ptr + at, ids, mask=slot < PER_TOKEN)
    tl.store(weight_ptr + at, weights / total * scale, mask=slot < PER_TOKEN)


@triton.jit
def _of_best_groups(
    choices, expert, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    GROUP_SLOTS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Whether each expert is of a group with the highest choice, or sum of the two highest; of equal groups the first."""
    group = tl.arange(0, GROUP_SLOTS)
    best = tl.full([GROUP_SLOTS], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where(expert // SIZE == g, choices, float("-inf"))
        highest = tl.max(own, 0)
        if TWO:
            first = tl.min(tl.where(own == highest, expert, BLOCK), 0)
            highest += tl.max(tl.where(expert == first, float("-inf"), own), 0)
        best = tl.where(group == g, highest, best)
    is_kept = expert < 0
    for _ in tl.static_range(KEPT):
        chosen = tl.min(tl.where(best == tl.max(best, 0), group, GROUP_SLOTS), 0)
        best = tl.where(group == chosen, float("-inf"), best)
        is_kept |= expert // SIZE == chosen
    return is_kept


@triton.jit
def _sort(
    id_ptr, order_ptr, expert_ptr, begin_ptr, end_ptr, pairs, blocks,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program places PART pairs, and writes PART blocks. The place of a pair is the number of pairs before it."""
    gdc_wait(PDL)
    gdc_launch(PDL)
    own, expert = tl.program_id(0) * PART + tl.arange(0, PART), tl.arange(0, SLOTS)
    mine = tl.load(id_ptr + own, mask=own < pairs, other=1 << 20)
    place, counts = tl.zeros([PART], tl.int32), tl.zeros([SLOTS], tl.int32)
    for first in range(0, pairs, PART):
        every = first + tl.arange(0, PART)
        ids = tl.load(id_ptr + every, mask=every < pairs, other=1 << 20)[None, :]
        is_before = (ids < mine[:, None]) | ((ids == mine[:, None]) & (every[None, :] < own[:, None]))
        place += tl.sum(is_before.to(tl.int32), 1)
        counts += tl.sum((ids == expert[:, None]).to(tl.int32), 1)
    tl.store(order_ptr + place, own, mask=own < pairs)

    starts = tl.cumsum(counts, 0) - counts
    own_blocks = (counts + ROWS - 1) // ROWS
    last = tl.cumsum(own_blocks, 0)
    found = tl.sum((last[None, :] <= own[:, None]).to(tl.int32), 1)  # the expert of each block
    found = tl.minimum(found, EXPERTS - 1)
    is_own = expert[None, :] == found[:, None]
    first = tl.sum(tl.where(is_own, (last - own_blocks)[None, :], 0), 1)
    begin = tl.sum(tl.where(is_own, starts[None, :], 0), 1)
    end = begin + tl.sum(tl.where(is_own, counts[None, :], 0), 1)
    begin += (own - first) * ROWS
    tl.store(expert_ptr + own, found, mask=own < blocks)
    tl.store(begin_ptr + own, begin, mask=own < blocks)
    tl.store(end_ptr + own, tl.minimum(begin + ROWS, end), mask=own < blocks)
