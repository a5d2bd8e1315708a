"""How attention is divided into programs, and the scratch memory for partial results."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.formats.layout import gpu_model

MAX_SPLITS = 32
"""Most parts of one context; the program that combines them reads them one after another."""

_WAVES = 2
"""Programs per multiprocessor up to which contexts of prompts are split."""

_FEW_WAVES = 8
"""The same for few rows. Such a program waits for memory most of the time: on an H200 eight sequences of 32K tokens take half
as long as with two."""

_FILLED_WAVES = 3
"""Programs per multiprocessor that leave nothing to gain from splits of few rows."""

_FEW_GROUPS = {64: 32, 128: 8}
"""Sequences times key-value heads up to which programs of few rows read 128 keys at once, by the width of heads. On an H200 a
step of a draft model with 3 heads of 64 takes 5 to 7% less time for 1 and 8 sequences, and 8% more for 32. Attention of one
sequence with 8 heads of 128 takes 9 to 22% less for 8K and 32K tokens."""

FEW_ROWS = 16
"""Rows of a sequence up to which contexts are split as for one row, so that sums run in the same order."""

MOST_ROWS = 1 << 30
"""No limit on the rows of a sequence."""

_SEARCHES = (1, 32, 64, 256)
"""Widths of the search for a program's sequence. A wider search takes no longer, and few widths need few kernels. From 128
on it needs a third more registers (166 instead of 123 on Hopper with heads of 128)."""


class AttentionScratch:
    """Memory for the partial results of a context. All launches in one stream can share it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._values = torch.empty(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)

    def take(self, groups: int, parts: int, tile: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, sums, counters) for `groups` groups of `parts` partial results. The memory is reused while large enough."""
        each = groups * parts * tile
        if len(self._values) < each * (width + 2):
            self._values = torch.empty(power_of_two(each * (width + 2)), device=self._device)
        if len(self._counters) < groups:
            self._counters = torch.zeros(power_of_two(groups), dtype=torch.int32, device=self._device)
        outputs, sums = self._values[: each * (width + 2)].split([each * width, each * 2])
        return outputs, sums, self._counters[:groups]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Static bounds and scratch of `paged_attention`, shared by all layers of a model.

    A program processes `tile` query vectors of one key-value head: `tile_rows` rows of one sequence times the heads of the
    group, at least 16 for the tensor cores.
    """

    num_rows: int
    num_sequences: int
    tile: int
    tile_rows: int
    num_tiles: int
    """Row tiles of all sequences; the last tile of each may be partly empty."""
    tile_keys: int
    num_splits: int
    search: int
    """Width of the search for a program's sequence. 0 if every sequence has `most_rows` rows, so that nothing is searched."""
    partial: Tensor  # num_tiles x KV x num_splits x tile x hd, float32, unnormalised outputs
    sums: Tensor  # num_tiles x KV x num_splits x 2 x tile, float32, running maximum (base 2) and sum
    counters: Tensor  # num_tiles x KV, int32, finished parts; zero between launches
    least_rows: int = 1
    most_rows: int = MOST_ROWS
    """Rows of the sequences that are computed, `least_rows` to `most_rows`."""
    few: "AttentionPlan | None" = None
    """Plan of the other sequences, which have few rows. A tile for prompts takes several times as long for a single row."""


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
    is_uniform: bool = False,
) -> AttentionPlan:
    """The plan for passes of `num_rows` rows over `num_sequences` sequences, with up to `max_rows` rows each. With `is_uniform`
    each has exactly `max_rows`, so that a program need not search for its sequence.

    Sequences with more rows are computed correctly but more slowly. If `num_splits` is None, there are enough splits to fill
    the device. If `scratch` is None, the plan gets new memory.
    """
    group = num_heads // num_kv_heads
    is_few = max_rows <= FEW_ROWS
    queries = min(max_rows * group, 32) if is_few else min(power_of_two(max_rows) * group, 128)
    tile = power_of_two(max(16, group, queries))
    tile_rows = tile // group
    if is_uniform:
        assert num_rows == num_sequences * max_rows
        num_tiles = num_sequences * -(-max_rows // tile_rows)
    else:  # the tiles of sequence s begin at starts[s] // tile_rows + s: enough for its rows, wherever they start
        num_tiles = num_rows // tile_rows + num_sequences
    if num_splits is None:
        each = 1 if is_few else -(-max_rows // tile_rows)
        busy = min(num_tiles, num_sequences * each) * num_kv_heads
        processors = _multiprocessors(torch.device(device))
        # In a pass with prompts, the scratch memory has room for the tiles of all rows
        is_alone = is_few and num_rows <= num_sequences * max_rows
        waves = _WAVES if not is_alone else _FEW_WAVES if busy < _FILLED_WAVES * processors else 1
        most = max(1, min(MAX_SPLITS, waves * processors // busy))
        # One kernel per power of two; per power of four if there are many rows
        exponent = most.bit_length() - 1
        num_splits = 1 << (exponent if is_few else exponent // 2 * 2)
    # More keys at once are faster for several rows, and for few programs. Passes of few rows keep the bits of plain decoding
    has_few_groups = num_sequences * num_kv_heads <= _FEW_GROUPS.get(max(64, power_of_two(head_dim)), 0)
    tile_keys = 128 if is_few and (has_few_groups or (tile > 16 and num_rows > FEW_ROWS)) else 64
    groups = num_tiles * num_kv_heads if num_splits > 1 else 0
    partial, sums, counters = (scratch or AttentionScratch(device)).take(groups, num_splits, tile, head_dim)
    return AttentionPlan(
        num_rows=num_rows,
        num_sequences=num_sequences,
        tile=tile,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
        tile_keys=tile_keys,
        num_splits=num_splits,
        search=0 if is_uniform else search_width(num_sequences),
        partial=partial,
        sums=sums,
        counters=counters,
        most_rows=max_rows if is_uniform else MOST_ROWS,
    )


def ragged_plan(
    num_rows: int,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    scratch: AttentionScratch | None = None,
    few_rows: int = 1,
    num_decoding: int = 0,
) -> AttentionPlan:
    """The plan for passes with prompts and with sequences that decode, with one launch for each. `few_rows` and `num_decoding`
    are those of `PassSize`. The contexts of sequences whose rows are known are split as in passes without prompts."""
    scratch = scratch or AttentionScratch(device)
    heads = num_heads, num_kv_heads, head_dim
    plan = attention_plan(num_rows, num_sequences, num_rows, *heads, device, scratch=scratch)
    if num_decoding:
        decoding = _decoding_plan(num_decoding, few_rows, *heads, device, scratch)
        return replace(plan, least_rows=few_rows + 1, few=decoding)
    few = attention_plan(num_rows, num_sequences, few_rows, *heads, device, scratch=scratch)
    if num_sequences == 1 or few.tile == plan.tile:
        return plan
    most = max(few.tile_rows, few_rows)
    return replace(plan, least_rows=most + 1, few=replace(few, most_rows=most))


def _decoding_plan(
    num_sequences: int,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    scratch: AttentionScratch,
) -> AttentionPlan:
    """The plan for the first sequences of a pass, which have `rows` rows each, with the kernel of the batch that they would be
    padded to."""
    batch = power_of_two(num_sequences)
    heads = num_heads, num_kv_heads, head_dim
    plan = attention_plan(batch * rows, batch, rows, *heads, device, scratch=scratch, is_uniform=True)
    tiles = plan.num_tiles // batch * num_sequences
    return replace(plan, num_rows=num_sequences * rows, num_sequences=num_sequences, num_tiles=tiles)


def search_width(num_sequences: int) -> int:
    """Width of the search among `num_sequences` sequences."""
    return next((width for width in _SEARCHES if width >= num_sequences), power_of_two(num_sequences))


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()


def _multiprocessors(device: torch.device) -> int:
    gpu = gpu_model(device)
    return 1 if gpu is None else gpu.multiprocessors
