"""Tile shapes of matrix products: measured ones from a table, an estimate for other shapes."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MEASURED = Path(__file__).with_name("tiles.json")
"""Tiles measured on an H200 by benchmarks/tune_linear.py."""


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
    """Programs per strip, each with a part of its columns; 1 for paired outputs."""


def block_rows(rows: int) -> int:
    """Rows of x per program; tensor cores process eight at a time."""
    return 8 if rows <= 8 else 16 if rows <= 16 else 32 if rows <= 32 else 64


def tile_for(rows: int, outputs: int, inputs: int, itemsize: int, is_paired: bool) -> Tile:
    """The tile for a product. All numbers of rows up to 16 have the same tile and so sum in the same order: a row's bits do not
    depend on the number of rows."""
    is_few = rows <= 16
    measured = _measured().get(tile_key(is_few, outputs, inputs, itemsize, is_paired))
    if measured is not None:
        return measured
    if inputs <= 2048:
        return Tile(16, 256 // itemsize, 1, 4)
    if not is_few:
        return Tile(64, 256 // itemsize, 4, 4, splits=2 if outputs <= 4096 and not is_paired else 1)
    return Tile(16, 512 // itemsize, 1, 4)


def tile_key(is_few: bool, outputs: int, inputs: int, itemsize: int, is_paired: bool) -> str:
    return f"{'pairs' if is_paired else 'rows'} {outputs}x{inputs} bytes {itemsize} {'few' if is_few else 'many'}"


@cache
def _measured() -> dict[str, Tile]:
    if not MEASURED.exists():
        return {}
    return {key: Tile(*values) for key, values in json.loads(MEASURED.read_text()).items()}
