"""For tune_linear.py: the matrices of a model, by class of row counts, and the tiles that are tried for each."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from paceline.kernels.gpu.tiles import RowClass, Tile, tile_for, tile_key

ROWS = {RowClass.UP_TO_16: (8, 16), RowClass.UP_TO_64: (32, 64), RowClass.MORE: (128, 1024)}
"""The two numbers of rows that a tile of a class is measured with."""
DTYPES = {"8b": torch.bfloat16, "70b": torch.float8_e4m3fn, "135m": torch.bfloat16}
SHAPES = {"8b": (4096, 32, 8, 128, 14336), "70b": (8192, 64, 8, 128, 28672), "135m": (576, 9, 3, 64, 1536)}
"""Width, heads, heads of keys and values, width of a head, width of the feed-forward layer."""
SHARED_BYTES = 227 * 1024
"""Most shared memory of a program on an H200."""
PROCESSORS = 132


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # product, add_linear, gate_up, qkv, head
    outputs: int
    inputs: int
    dtype: torch.dtype
    row_class: RowClass
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def nbytes(self) -> int:
        return self.outputs * self.inputs * self.dtype.itemsize

    @property
    def rows(self) -> tuple[int, int]:
        return ROWS[self.row_class]

    @property
    def is_paired(self) -> bool:
        return self.kind in ("qkv", "gate_up")

    @property
    def key(self) -> str:
        return tile_key(self.row_class, self.outputs, self.inputs, self.dtype.itemsize, self.is_paired)

    @property
    def before(self) -> Tile:
        """The tile that products use now."""
        return tile_for(self.rows[1], self.outputs, self.inputs, self.dtype.itemsize, self.is_paired)

    def kernel(self, rows: int, tile: Tile) -> tuple[object, ...]:
        """Equal for cases and numbers of rows that use the same compiled kernel."""
        outputs = self.outputs % tile.outputs == 0, self.outputs % 16 == 0
        return self.kind, self.inputs, self.dtype, tile.rows_of(rows), replace(tile, rows=0), outputs


@dataclass(frozen=True)
class Work:
    """Tiles whose kernels one call compiles."""

    case: Case
    rows: int
    tiles: tuple[Tile, ...]


def cases_of(models: Iterable[str], classes: Iterable[RowClass], is_quick: bool) -> list[Case]:
    """The most important matrices first. `is_quick`: without the head, a small part of a pass."""
    found = [case for name in models for row_class in classes for case in _shapes(name, row_class)]
    return [case for case in found if not (is_quick and case.kind == "head")]


def _shapes(name: str, row_class: RowClass) -> list[Case]:
    d, heads, kv, hd, ffn = SHAPES[name]
    dtype, qkv = DTYPES[name], (heads + 2 * kv) * hd
    if row_class is RowClass.MORE:
        if dtype.itemsize > 1:
            return []
        shapes = {"gate_up": (2 * ffn, d), "down": (d, ffn), "qkv": (qkv, d), "o": (d, heads * hd)}
        return [Case(f"{name} {part}", "product", *shape, dtype, row_class) for part, shape in shapes.items()]
    return [
        Case(f"{name} gate_up", "gate_up", 2 * ffn, d, dtype, row_class),
        Case(f"{name} down", "add_linear", d, ffn, dtype, row_class),
        Case(f"{name} qkv", "qkv", qkv, d, dtype, row_class, heads, kv, hd),
        Case(f"{name} o", "add_linear", d, heads * hd, dtype, row_class),
        Case(f"{name} head", "head", 49152, d, torch.bfloat16, row_class),
    ]


def tiles_of(case: Case, is_quick: bool) -> list[Tile]:
    """The tile of now first, then those to try."""
    if case.row_class is RowClass.MORE:
        found = _more(case, is_quick)
    elif case.row_class is RowClass.UP_TO_64:
        found = _up_to_64(case, is_quick)
    else:
        found = _up_to_16(case, is_quick)
    return list(dict.fromkeys([case.before, *found]))


def _up_to_16(case: Case, is_quick: bool) -> list[Tile]:
    wide = 2 // case.dtype.itemsize  # 8-bit tiles have the same width in bytes
    if case.inputs <= 2048:
        return _grid(((16, 1), (16, 2), (32, 2)), (128, 256), (3, 5))
    if is_quick:
        return _grid(((16, 1), (32, 2), (64, 4)), (128 * wide, 256 * wide), (3, 4))
    return _grid(((16, 1), (16, 2), (32, 2), (64, 4)), (256 * wide, 512 * wide), (3, 4, 6))


def _up_to_64(case: Case, is_quick: bool) -> list[Tile]:
    wide, narrow = 2 // case.dtype.itemsize, list[Tile]()
    if case.inputs <= 2048:
        # Every strip reads all rows again, so the head needs wide strips.
        strips = ((64, 4), (128, 4), (128, 8)) if case.kind == "head" else ((16, 1), (16, 2), (16, 4), (32, 2), (32, 4))
        found = _grid(strips, (64, 128, 256), (3, 5))
    elif is_quick:
        found = _grid(((64, 4), (128, 4), (128, 8)), (64 * wide, 128 * wide), (3, 4))
    else:
        found = _grid(((32, 4), (64, 4), (128, 4)), (64 * wide, 128 * wide), (3, 4, 6))
        narrow = _grid(((16, 1), (16, 2), (32, 1), (32, 2)), (128, 256), (3, 4, 5))
    if case.kind == "add_linear":  # too few programs otherwise
        found += [replace(tile, splits=splits) for tile in found for splits in ((2,) if is_quick else (2, 4))]
    return [tile for tile in [*narrow, *found] if fits(tile, case.rows[1], case.dtype.itemsize)]


def _more(case: Case, is_quick: bool) -> list[Tile]:
    strips = tuple(itertools.product((64, 128, 256), (8,) if is_quick else (4, 8)))
    grid = _grid(strips, (64, 128), (3,) if is_quick else (3, 4))
    found = [replace(tile, rows=rows) for rows in (64, 128, 256) for tile in grid]
    found = [tile for tile in found if fits(tile, case.rows[0], case.dtype.itemsize)]
    return [replace(tile, splits=splits) for tile in found for splits in _splits(case, tile)]


def _splits(case: Case, tile: Tile) -> tuple[int, ...]:
    """More than one where the smaller number of rows gives fewer than two programs to each processor."""
    programs = -(-case.outputs // tile.outputs) * -(-case.rows[0] // tile.rows)
    return tuple(splits for splits in (1, 2, 4) if splits == 1 or programs * splits < 2 * PROCESSORS)


def _grid(strips: Sequence[tuple[int, int]], inputs: Sequence[int], stages: Sequence[int]) -> list[Tile]:
    """`strips`: (outputs, warps)."""
    return [
        Tile(outputs, width, warps, deep) for (outputs, warps), width, deep in itertools.product(strips, inputs, stages)
    ]


def fits(tile: Tile, rows: int, itemsize: int) -> bool:
    """Whether shared memory holds the stages of a tile, and registers its sums and weights."""
    threads = 32 * tile.warps
    sums, weights = tile.outputs * tile.rows_of(rows) // threads, tile.outputs * tile.inputs // threads
    return shared_bytes(tile, rows, itemsize) <= SHARED_BYTES and sums <= 128 and sums + weights <= 256


def shared_bytes(tile: Tile, rows: int, itemsize: int) -> int:
    """As Triton 3.7 allocates it. Products of 64 outputs and four warps read x, and dense weights, from shared memory while the
    next stages are loaded; others copy both to registers first."""
    is_shared = tile.warps >= 4 and tile.outputs >= 64
    copies = tile.stages if is_shared else tile.stages - 1
    weights = copies if itemsize > 1 else tile.stages - 1
    return tile.inputs * (copies * tile.rows_of(rows) * 2 + weights * tile.outputs * itemsize)


def work_of(cases: Iterable[Case], is_quick: bool, size: int = 4) -> list[Work]:
    """Every kernel of the cases once, in their order."""
    known, found = set[tuple[object, ...]](), list[Work]()
    for case in cases:
        for rows in case.rows:
            fresh = [tile for tile in tiles_of(case, is_quick) if case.kernel(rows, tile) not in known]
            known |= {case.kernel(rows, tile) for tile in fresh}
            found += [Work(case, rows, tuple(fresh[i : i + size])) for i in range(0, len(fresh), size)]
    return found
