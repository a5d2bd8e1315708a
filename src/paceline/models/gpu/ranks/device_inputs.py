"""Inputs of device work in one vector of 64-bit numbers, in which rank 0 sends them to the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.layout import AttentionLayout
from paceline.models.parallel.commands import DeviceMove, DevicePass


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    layout: AttentionLayout


@dataclass(frozen=True, slots=True, eq=False)
class MoveInputs:
    """See `move_paths`."""

    contexts: Tensor  # [S] int32
    block_tables: Tensor  # [S, W] int32
    rows: Tensor  # [S, L + 1] int64
    counts: Tensor  # [S] int32


def pass_values(inputs: PassInputs) -> Tensor:
    """[N] int64. Slots are left out: ranks look them up in the block tables."""
    layout = inputs.layout
    trees = () if layout.ancestors is None else (layout.ancestors,)
    ints = layout.starts, layout.context_lens, layout.block_tables
    return _joined([inputs.tokens, inputs.positions, *trees, *ints])


def pass_inputs(values: Tensor, work: DevicePass) -> PassInputs:
    size, parts = work.size, _Parts(values)
    tokens, positions = parts.longs(size.rows), parts.longs(size.rows)
    ancestors = parts.longs(size.rows) if work.is_tree else None
    starts, contexts = parts.ints(size.sequences + 1), parts.ints(size.sequences)
    tables = parts.ints(size.sequences, work.table_width)
    return PassInputs(
        tokens, positions, AttentionLayout(tokens, starts, contexts, tables, ancestors, work.long_prompts)
    )


def move_values(inputs: MoveInputs) -> Tensor:
    """[N] int64"""
    return _joined([inputs.contexts, inputs.block_tables, inputs.rows, inputs.counts])


def move_inputs(values: Tensor, work: DeviceMove) -> MoveInputs:
    parts, trees = _Parts(values), work.trees
    contexts, tables = parts.ints(trees), parts.ints(trees, work.table_width)
    return MoveInputs(contexts, tables, parts.longs(trees, work.path_rows), parts.ints(trees))


def count_values(work: DevicePass | DeviceMove) -> int:
    """Length of the vector."""
    if isinstance(work, DeviceMove):
        return work.trees * (2 + work.table_width + work.path_rows)
    return (2 + work.is_tree) * work.size.rows + work.size.sequences * (2 + work.table_width) + 1


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1).long() for part in parts])


class _Parts:
    """Takes the parts of a vector in their order. Each is a tensor of its own: kernels expect aligned addresses."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._at = values, 0

    def longs(self, *shape: int) -> Tensor:
        return self._next(*shape).clone()

    def ints(self, *shape: int) -> Tensor:
        return self._next(*shape).int()

    def _next(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        self._at += count
        return self._values[self._at - count : self._at].view(shape)
