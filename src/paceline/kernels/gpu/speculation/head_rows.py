"""Rows of an EAGLE head's passes, computed on the device: fresh states of committed tokens, then the levels of a tree.

A slot of the head joins the hidden state of a token with the next token. Fresh states are those that the target has computed
since the head last ran, with the tokens after them. The head caches them when it runs next.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait


@dataclass(frozen=True, slots=True, eq=False)
class FreshStates:
    """Fresh states of S sequences, at most F each. The last is that of the second newest token."""

    counts: Tensor  # [S] int32
    tokens: Tensor  # [S, F] int64, token after each state
    states: Tensor  # [S, F, L * D], states of L layers, concatenated
    num_cached: Tensor  # [S] int32, slots that the head has cached


@dataclass(frozen=True, slots=True, eq=False)
class HeadPlaces:
    """Positions of the rows of a head's passes."""

    contexts: Tensor  # [S] int32, slots cached before the fresh states
    positions: Tensor  # [S * F] int64, of the fresh states
    last_rows: Tensor  # [S] int64, row of each sequence's last fresh state
    level_positions: Tensor  # [levels - 1, S * W] int64


def fresh_states(batch: int, rows: int, width: int, dtype: torch.dtype, device: torch.device | str) -> FreshStates:
    counts, num_cached = torch.zeros(2, batch, dtype=torch.int32, device=device).unbind()
    return FreshStates(
        counts,
        torch.zeros(batch, rows, dtype=torch.int64, device=device),
        torch.zeros(batch, rows, width, dtype=dtype, device=device),
        num_cached,
    )


def head_places(batch: int, rows: int, levels: int, width: int, device: torch.device | str) -> HeadPlaces:
    return HeadPlaces(
        torch.zeros(batch, dtype=torch.int32, device=device),
        torch.zeros(batch * rows, dtype=torch.int64, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
        torch.zeros(levels - 1, batch * width, dtype=torch.int64, device=device),
    )


def place_fresh(lengths: Tensor, fresh: FreshStates, out: HeadPlaces, max_position: int) -> None:
    """Write the positions of the fresh states and of the levels after them to `out`, and count the states as cached.
    `max_position` is as in `place_rows`."""
    batch, rows = fresh.tokens.shape
    levels, wide = out.level_positions.shape
    width = wide // batch
    _place[(batch,)](
        lengths, fresh.counts, fresh.num_cached, out.contexts, out.positions, out.last_rows, out.level_positions,
        max_position - 1, ROWS=rows, LEVELS=levels, WIDTH=width, BATCH=batch,
        PADDED=triton.next_power_of_2(rows), BEAMS=triton.next_power_of_2(width), num_warps=1, **PDL,
    )  # fmt: skip


def keep_fresh(
    fresh: FreshStates,
    layers: list[Tensor],  # each [T, D or more], hidden states of the pass that was just verified
    rows: Tensor,  # [S, L + 1] int64, rows of the pass whose tokens were committed
    counts: Tensor,  # [S] int32, number of these rows, minus one
    tokens: Tensor,  # [S, L + 1] int64, token after each
    active: Tensor,  # [S] int32
) -> None:
    """Append the states of committed tokens to `fresh`. F must be large enough for all tokens committed between two runs of the
    head."""
    batch, steps = rows.shape
    capacity, wide = fresh.states.shape[1:]
    width = wide // len(layers)
    for i, states in enumerate(layers):
        assert states.stride(1) == 1
        _keep[(batch,)](
            states, rows, counts, tokens, active, fresh.counts, fresh.tokens, fresh.states, states.stride(0), wide, i * width,
            STEPS=steps, CAPACITY=capacity, WIDTH=width, PADDED=triton.next_power_of_2(width), LAST=i == len(layers) - 1,
            num_warps=8, **PDL,
        )  # fmt: skip


@triton.jit
def _place(
    lengths, counts, num_cached, contexts, positions, last_rows, level_positions, last,
    ROWS: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, BATCH: tl.constexpr,
    PADDED: tl.constexpr, BEAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence = tl.program_id(0)
    row, beam = tl.arange(0, PADDED), tl.arange(0, BEAMS)
    length, count, cached = tl.load(lengths + sequence), tl.load(counts + sequence), tl.load(num_cached + sequence)
    # All tokens but the newest have states: the last is at position length - 2
    position = tl.maximum(length - 1 - count, 0) + row
    tl.store(positions + sequence * ROWS + row, tl.minimum(position, last).to(tl.int64), mask=row < ROWS)
    tl.store(contexts + sequence, cached)
    tl.store(last_rows + sequence, (sequence * ROWS + tl.maximum(count, 1) - 1).to(tl.int64))
    for level in range(LEVELS):
        at = level_positions + level * BATCH * WIDTH + sequence * WIDTH + beam
        tl.store(at, tl.zeros([BEAMS], tl.int64) + tl.minimum(length - 1 + level, last), mask=beam < WIDTH)
    tl.store(num_cached + sequence, cached + count)
    tl.store(counts + sequence, 0)


@triton.jit
def _keep(
    states, rows, counts, tokens, active, fresh_counts, fresh_tokens, fresh_states, stride, wide, column,
    STEPS: tl.constexpr, CAPACITY: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence = tl.program_id(0)
    if tl.load(active + sequence) == 0:
        return
    lane = tl.arange(0, PADDED)
    count, held = tl.load(counts + sequence), tl.load(fresh_counts + sequence)
    for step in range(STEPS):
        if (step <= count) & (held + step < CAPACITY):
            row = tl.load(rows + sequence * STEPS + step)
            to = sequence * CAPACITY + held + step
            state = tl.load(states + row * stride + lane, mask=lane < WIDTH, other=0.0)
            tl.store(fresh_states + to.to(tl.int64) * wide + column + lane, state, mask=lane < WIDTH)
            if LAST:
                tl.store(fresh_tokens + to, tl.load(tokens + sequence * STEPS + step))
    if LAST:
        tl.debug_barrier()  # all warps have read the count
        tl.store(fresh_counts + sequence, tl.minimum(held + count + 1, CAPACITY))
