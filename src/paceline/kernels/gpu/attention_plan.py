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

_SEARCHES = (1, 32, 64, 256)
"""Among how many sequences a program looks for its own. A few more take no longer, and a kernel serves many batches; but from
128 on it takes a third more registers (166 instead of 123 on Hopper with heads of 128)."""


class AttentionScratch:
    """Memory in which the parts of a context meet. One serves all launches that follow one another in a stream."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._values = torch.empty(0, device=device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def take(self, meetings: int, parts: int, tile: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, sums, arrived) for `parts` parts at each meeting: the same memory every time, while it is large enough."""
        each = meetings * parts * tile
        if len(self._values) < each * (width + 2):
            self._values = torch.empty(power_of_two(each * (width + 2)), device=self._device)
        if len(self._arrived) < meetings:
            self._arrived = torch.zeros(power_of_two(meetings), dtype=torch.int32, device=self._device)
        outputs, sums = self._values[: each * (width + 2)].split([each * width, each * 2])
        return outputs, sums, self._arrived[:meetings]


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
    search: int
    num_warps: int
    num_stages: int
    partial: Tensor  # num_tiles x KV x num_splits x tile x hd, float32, unnormalised outputs
    sums: Tensor  # num_tiles x KV x num_splits x 2 x tile, float32, running maximum (base 2) and sum
    arrived: Tensor  # num_tiles x KV, int32, zero between launches


def attention_plan(
    num_rows: int,
    num_sequences: int,
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    num_splits: int | None = None,
    scratch: AttentionScratch | None = None,
) -> AttentionPlan:
    """For passes of `num_rows` rows over `num_sequences` sequences, of mostly at most `max_rows` rows each.

    More rows of a sequence are right too, only slower. `num_splits` None: as many as fill the device. `scratch` None: some of
    its own.
    """
    group = num_heads // num_kv_heads
    is_few = max_rows <= _FEW_ROWS
    queries = min(max_rows * group, 32) if is_few else min(power_of_two(max_rows) * group, 128)
    tile = power_of_two(max(16, group, queries))
    tile_rows = tile // group
    # Sequence s owns tiles from starts[s] // tile_rows + s on: enough for its rows, wherever they start
    num_tiles = num_rows // tile_rows + num_sequences
    if num_splits is None:
        each = 1 if is_few else -(-max_rows // tile_rows)
        busy = min(num_tiles, num_sequences * each) * num_kv_heads
        most = max(1, min(MAX_SPLITS, _WAVES * _multiprocessors(torch.device(device)) // busy))
        # A kernel for each power of two, not for each number; where there is much else to do, of four
        exponent = most.bit_length() - 1
        num_splits = 1 << (exponent if is_few else exponent // 2 * 2)
    meetings = num_tiles * num_kv_heads if num_splits > 1 else 0
    partial, sums, arrived = (scratch or AttentionScratch(device)).take(meetings, num_splits, tile, head_dim)
    return AttentionPlan(
        num_rows=num_rows,
        num_sequences=num_sequences,
        tile=tile,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
        tile_keys=64,
        num_splits=num_splits,
        search=search_width(num_sequences),
        num_warps=8 if tile > 64 else 4,
        num_stages=2 if tile > 64 else 3,
        partial=partial,
        sums=sums,
        arrived=arrived,
    )


def search_width(num_sequences: int) -> int:
    """At least `num_sequences`."""
    return next((width for width in _SEARCHES if width >= num_sequences), power_of_two(num_sequences))


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
