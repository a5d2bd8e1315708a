"""Tile shapes of matrix products: measured ones from a table, an estimate for other shapes."""

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

MEASURED = Path(__file__).with_name("tiles.json")
"""Tiles measured on an H200 by benchmarks/gpu/tune_linear.py."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A strip of `outputs` rows, processed `inputs` columns at a time. With paired outputs a strip has `outputs` / 2 pairs."""

    outputs: int
    inputs: int
    warps: int
    stages: int
    ahead: int = 2
    """Tiles that a program prefetches while the previous kernel still runs."""
    splits: int = 1
    """Programs per strip, each with a part of its columns; 1 for paired outputs that are not 4-bit."""
    rows: int = 0
    """Rows of x per program. If it is 0, `block_rows` decides."""

    def rows_of(self, rows: int) -> int:
        """Rows of x per program, in a product of `rows` rows."""
        return self.rows or block_rows(rows)


class RowClass(StrEnum):
    """Numbers of rows of x that share a tile."""

    UP_TO_16 = "up to 16 rows"
    UP_TO_64 = "17 to 64 rows"
    MORE = "more than 64 rows"
    """Tiles of 8-bit and 4-bit weights. Dense products with more than 64 rows use the vendor's library."""

    @classmethod
    def of(cls, rows: int) -> "RowClass":
        return cls.UP_TO_16 if rows <= 16 else cls.UP_TO_64 if rows <= 64 else cls.MORE


def block_rows(rows: int) -> int:
    """Rows of x per program; tensor cores process eight at a time."""
    return 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64


def tile_for(rows: int, outputs: int, inputs: int, itemsize: int, is_paired: bool) -> Tile:
    """The tile for a product. Tiles of dense weights have one split: the order of the sums of a row does not depend on the
    number of rows. Without a measured tile, more than 64 rows have that of 17 to 64."""
    row_class = RowClass.of(rows)
    if itemsize == 2 and inputs > 2048 and 8 < rows <= 16:
        row_class = RowClass.UP_TO_64  # larger strips are faster for wide dense weights from 9 rows on
    for known in (row_class, RowClass.UP_TO_64) if row_class is RowClass.MORE else (row_class,):
        measured = _measured().get(tile_key(known, outputs, inputs, itemsize, is_paired))
        if measured is not None:
            return measured
    if inputs <= 2048:
        return Tile(16, 256 // itemsize, 1, 4)
    if row_class is not RowClass.UP_TO_16:
        return Tile(64, 256 // itemsize, 4, 4)
    return Tile(16, 512 // itemsize, 1, 4)


def router_tile(rows: int, inputs: int) -> Tile:
    """The tile of a product with few outputs, whose columns are split so that many programs share them. The splits and the
    order of their sums do not depend on the number of rows."""
    splits = max(1, min(8, inputs // 256))
    return Tile(16, 128, 1, 4, splits=splits) if rows <= 64 else Tile(64, 128, 4, 3, splits=splits)


def four_bit_tile(rows: int, outputs: int, inputs: int, is_paired: bool) -> Tile:
    """As `tile_for`, for 4-bit weights. Unpacking takes as many instructions as memory allows, so that few rows need many
    warps. The rows of a program share it, so that many rows need large programs."""
    row_class = RowClass.of(rows)
    measured = _measured().get(four_bit_key(row_class, outputs, inputs, is_paired))
    if measured is not None:
        return measured
    if row_class is RowClass.MORE:
        return Tile(128, 128, 8, 3, rows=128)
    if row_class is RowClass.UP_TO_16:
        tile, programs = Tile(32, 256, 1, 4), 800
    else:
        tile, programs = Tile(128 if outputs >= 16384 else 64, 128, 4, 4), 224
    splits = 1
    while splits < 8 and -(-outputs // tile.outputs) * splits < programs and inputs >= 1024 * splits:
        splits *= 2
    return whole_blocks(replace(tile, splits=splits), inputs)


def whole_blocks(tile: Tile, inputs: int) -> Tile:
    """The tile with fewer columns or splits, so that they divide the blocks of 128 inputs that 4-bit weights are padded to."""
    blocks, width, splits = -(-inputs // 128), tile.inputs, tile.splits
    while splits > 1 and blocks % splits:
        splits //= 2
    while width > 128 and blocks // splits * 128 % width:
        width //= 2
    return replace(tile, inputs=width, splits=splits)


def four_bit_key(row_class: RowClass, outputs: int, inputs: int, is_paired: bool) -> str:
    return f"{'pairs' if is_paired else 'rows'} {outputs}x{inputs} bits 4, {row_class}"


def tile_key(row_class: RowClass, outputs: int, inputs: int, itemsize: int, is_paired: bool) -> str:
    return f"{'pairs' if is_paired else 'rows'} {outputs}x{inputs} bytes {itemsize}, {row_class}"


@cache
def _measured() -> dict[str, Tile]:
    if not MEASURED.exists():
        return {}
    return {key: Tile(*values) for key, values in json.loads(MEASURED.read_text()).items()}
