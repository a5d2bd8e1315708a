"""How attention is divided into programs, and the scratch memory for their states. No bit of a result depends on it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.formats.layout import gpu_model
from paceline.kernels.gpu.attention.order import GROUP_KEYS, PART_KEYS

MAX_SPLITS = 32
"""Most programs that share the keys of one tile of rows."""

_MAX_STATE_BYTES = 1 << 28
"""Scratch memory above which no context is split. Passes that large have programs enough, unless contexts are very long."""

_WAVES = 2
"""Programs per multiprocessor up to which contexts of prompts are split."""

_FEW_WAVES = 8
"""The same for few rows. Such a program waits for memory most of the time: on an H200 eight sequences of 32K tokens take half
as long as with two."""

_FILLED_WAVES = 3
"""Programs per multiprocessor that leave nothing to gain from splits of few rows."""

FEW_ROWS = 16
"""Rows of a sequence up to which a pass is one of few rows."""

MOST_ROWS = 1 << 30
"""No limit on the rows of a sequence."""

_SEARCHES = (1, 32, 64, 256)
"""Widths of the search for a program's sequence. A wider search takes no longer, and few widths need few kernels. From 128
on it needs a third more registers (166 instead of 123 on Hopper with heads of 128)."""


class AttentionScratch:
    """Memory for the states of parts and groups. All launches in one stream can share it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._values = torch.empty(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)

    def take(self, num_states: int, width: int, num_counters: int) -> tuple[Tensor, Tensor, Tensor]:
        """(outputs, sums, counters). The memory is reused while large enough."""
        if len(self._values) < num_states * (width + 2):
            self._values = torch.empty(power_of_two(num_states * (width + 2)), device=self._device)
        if len(self._counters) < num_counters:
            self._counters = torch.zeros(power_of_two(num_counters), dtype=torch.int32, device=self._device)
        outputs, sums = self._values[: num_states * (width + 2)].split([num_states * width, num_states * 2])
        return outputs, sums, self._counters[:num_counters]


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
    num_splits: int
    """Most programs of a tile and a key-value head."""
    search: int
    """Width of the search for a program's sequence. 0 if every sequence has `most_rows` rows, so that nothing is searched."""
    group_slots: int
    """States of groups that every row and head has room for."""
    states: Tensor  # slots x num_rows x H x hd, float32, weighted values
    sums: Tensor  # slots x num_rows x H x 2, float32, highest score and sum of weights
    counters: Tensor  # num_tiles x KV x (group_slots + 1), int32, finished programs; zero between launches
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
    longest: int,
    device: torch.device | str,
    num_splits: int | None = None,
    scratch: AttentionScratch | None = None,
    is_uniform: bool = False,
    is_tree: bool = False,
    tile: int | None = None,
) -> AttentionPlan:
    """The plan for passes of `num_rows` rows over `num_sequences` sequences, with up to `max_rows` rows each. With `is_uniform`
    each has exactly `max_rows`, so that a program need not search for its sequence.

    Sequences with more rows are computed correctly but more slowly. `longest` bounds the tokens of a sequence, with those of
    the pass. If `num_splits` is None, there are enough splits to fill the device; if `tile` is None, it suits `max_rows`. If
    `scratch` is None, the plan gets new memory. A plan for passes with trees serves other passes too.
    """
    group = num_heads // num_kv_heads
    is_few = max_rows <= FEW_ROWS
    if tile is None:
        widest = 128 if head_dim <= 128 else 64  # as registers allow
        queries = min(max_rows * group, 32) if is_few else min(power_of_two(max_rows) * group, widest)
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
    group_slots, slots = -(-longest // GROUP_KEYS.value), 2 if is_tree else 0
    if num_splits > 1:
        # Of spans shorter than a group, every part has a state
        slots = max(slots, group_slots + num_splits * (GROUP_KEYS.value // 2 // PART_KEYS.value))
        if slots * num_rows * num_heads * (head_dim + 2) * 4 > _MAX_STATE_BYTES:
            num_splits, slots = 1, 2 if is_tree else 0
    num_counters = num_tiles * num_kv_heads * (group_slots + 1) if num_splits > 1 else 0
    scratch = scratch or AttentionScratch(device)
    states, sums, counters = scratch.take(slots * num_rows * num_heads, head_dim, num_counters)
    return AttentionPlan(
        num_rows=num_rows,
        num_sequences=num_sequences,
        tile=tile,
        tile_rows=tile_rows,
        num_tiles=num_tiles,
        num_splits=num_splits,
        search=0 if is_uniform else search_width(num_sequences),
        group_slots=group_slots,
        states=states,
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
    longest: int,
    device: torch.device | str,
    scratch: AttentionScratch | None = None,
    few_rows: int = 1,
    num_decoding: int = 0,
    is_tree: bool = False,
) -> AttentionPlan:
    """The plan for passes with prompts and with sequences that decode, with one launch for each. `few_rows` and `num_decoding`
    are those of `PassSize`. The contexts of sequences whose rows are known are split as in passes without prompts. The other
    arguments are those of `attention_plan`."""
    scratch = scratch or AttentionScratch(device)
    heads = num_heads, num_kv_heads, head_dim, longest
    plan = attention_plan(num_rows, num_sequences, num_rows, *heads, device, scratch=scratch, is_tree=is_tree)
    if num_decoding:
        decoding = _decoding_plan(num_decoding, few_rows, *heads, device, scratch)
        return replace(plan, least_rows=few_rows + 1, few=decoding)
    few = attention_plan(num_rows, num_sequences, few_rows, *heads, device, scratch=scratch, is_tree=is_tree)
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
    longest: int,
    device: torch.device | str,
    scratch: AttentionScratch,
) -> AttentionPlan:
    """The plan for the first sequences of a pass, which have `rows` rows each, with the kernel of the batch that they would be
    padded to."""
    batch = power_of_two(num_sequences)
    heads = num_heads, num_kv_heads, head_dim, longest
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
