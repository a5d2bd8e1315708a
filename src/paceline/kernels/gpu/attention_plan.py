"""How a pass of at most so many rows is cut into programs, and the memory its parts meet in."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SPLITS = 64
"""Parts that one context may be cut into; the program that joins them reads them one after another."""

_WAVES = 2
"""Programs wanted for each multiprocessor before contexts are left whole."""

_FEW_ROWS = 16
"""Up to so many rows of a sequence are cut up as one row is, so that their sums run alike."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Static bounds and scratch of `paged_attention`, made once and shared by all layers of a model.

    A program takes `tile` query vectors of one key-value head: `tile_rows` rows of one sequence times the heads of the
    group, at least 16 of them because tensor cores want that many.
    """

    num_rows: int
    num_sequences: int
    tile: int
    tile_rows: int
    num_tiles: int
    """Row tiles of all sequences together, each of which may waste part of one."""
    tile_keys: int
    num_splits: int
    num_warps: int
    num_stages: int
    partial: Tensor  # [num_tiles, KV, num_splits, tile, hd] float32, unnormalised outputs
    sums: Tensor  # [num_tiles, KV, num_splits, 2, tile] float32, running maximum (base 2) and sum
    arrived: Tensor  # [num_tiles, KV] int32, zero between launches


def attention_plan(
    num_rows: int,
    num_sequences: int,
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    num_splits: int | None = None,
) -> AttentionPlan:
    """For passes of `num_rows` rows over `num_sequences` sequences, of mostly at most `max_rows` rows each.

    More rows of a sequence are right too, only slower. `num_splits` None: as many as fill the device.
    """
    group = num_heads // num_kv_heads
    is_few = max_rows <= _FEW_ROWS
    tile = _power_of_two(max(16, group, min(max_rows * group, 32 if is_few else 128)))
    tile_rows = tile // group
    # Sequence s owns tiles from starts[s] // tile_rows + s on: enough for its rows, wherever they start
    num_tiles = num_rows // tile_rows + num_sequences
    if num_splits is None:
        each = 1 if is_few else -(-max_rows // tile_rows)
        busy = min(num_tiles, num_sequences * each) * num_kv_heads
        most = max(1, min(MAX_SPLITS, _WAVES * _multiprocessors(torch.device(device)) // busy))
        num_splits = 1 << (most.bit_length() - 1)  # a kernel for each power of two, not for each number
    has_parts = num_splits > 1
    shape = (num_tiles, num_kv_heads, num_splits) if has_parts else (0, num_kv_heads, num_splits)
    return AttentionPlan(
        num_rows=num_rows,
        num_sequences=num_sequences,
        tile=tile,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
        tile_keys=64,
        num_splits=num_splits,
        num_warps=8 if tile > 64 else 4,
        num_stages=2 if tile > 64 else 3,
        partial=torch.empty(*shape, tile, head_dim, device=device),
        sums=torch.empty(*shape, 2, tile, device=device),
        arrived=torch.zeros(shape[:2], dtype=torch.int32, device=device),
    )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
