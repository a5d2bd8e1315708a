"""Which tile a product has: by class of row counts, measured or estimated."""

import json
import re
from typing import Any

import pytest
import torch

from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.quantized import QuantizedWeight
from paceline.kernels.gpu import linear as products
from paceline.kernels.gpu import tiles
from paceline.kernels.gpu.tiles import MEASURED, RowClass, Tile, four_bit_key, four_bit_tile, tile_for, tile_key

KEY = re.compile(r"(pairs|rows) (\d+)x(\d+) (bytes [124]|bits 4), (.+)")
WIDE = Tile(128, 64, 8, 3, rows=128)


def measured_keys() -> list[tuple[bool, int, int, str, RowClass]]:
    found = []
    for key in json.loads(MEASURED.read_text()):
        parsed = KEY.fullmatch(key)
        assert parsed is not None, key
        kind, outputs, inputs, size, row_class = parsed.groups()
        found.append((kind == "pairs", int(outputs), int(inputs), size, RowClass(row_class)))
    return found


@pytest.fixture
def wide_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured tile of more than 64 rows, of 8-bit and of 4-bit weights."""
    keys = tile_key(RowClass.MORE, 256, 4096, 1, False), four_bit_key(RowClass.MORE, 256, 4096, False)
    known = tiles._measured() | dict.fromkeys(keys, WIDE)
    monkeypatch.setattr(tiles, "_measured", lambda: known)


@pytest.mark.parametrize(
    ("first", "last", "row_class"),
    [(1, 16, RowClass.UP_TO_16), (17, 64, RowClass.UP_TO_64), (65, 100_000, RowClass.MORE)],
)
def test_every_number_of_rows_has_a_class(first: int, last: int, row_class: RowClass) -> None:
    assert RowClass.of(first) is RowClass.of(last) is row_class


def test_measured_tiles_belong_to_a_class() -> None:
    keys = measured_keys()
    assert len(keys) == len(tiles._measured())
    for is_paired, outputs, inputs, size, row_class in keys:
        if size == "bits 4":
            key = four_bit_key(row_class, outputs, inputs, is_paired)
        else:
            key = tile_key(row_class, outputs, inputs, int(size.split()[1]), is_paired)
        tile = tiles._measured()[key]
        # dense products of more than 64 rows use the vendor's library, and pairs have at most 64 rows
        assert row_class is not RowClass.MORE or (size in ("bytes 1", "bits 4") and not is_paired)
        assert row_class is RowClass.MORE or tile.rows == 0


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_up_to_16_rows_have_one_order(itemsize: int, is_paired: bool) -> None:
    """One tile, or tiles that do not split K."""
    shapes = {(outputs, inputs) for _, outputs, inputs, *_ in measured_keys()} | {(1024, 512), (1024, 4096)}
    for outputs, inputs in shapes:
        found = {tile_for(rows, outputs, inputs, itemsize, is_paired) for rows in range(1, 17)}
        assert len(found) == 1 or {tile.splits for tile in found} == {1}
        assert {tile.rows for tile in found} == {0}


def test_more_than_64_rows_have_the_tile_of_64_until_one_is_measured() -> None:
    for is_paired, outputs, inputs, size, row_class in measured_keys():
        key = tile_key(RowClass.MORE, outputs, inputs, 1, is_paired)
        if row_class is RowClass.UP_TO_64 and size == "bytes 1" and key not in tiles._measured():
            assert tile_for(65, outputs, inputs, 1, is_paired) == tile_for(64, outputs, inputs, 1, is_paired)
    assert tile_for(65, 256, 4096, 1, False) == tile_for(64, 256, 4096, 1, False)
    assert four_bit_tile(65, 4096, 4096, False) == Tile(128, 128, 8, 3, rows=128)


@pytest.mark.usefixtures("wide_tile")
def test_a_measured_tile_of_more_than_64_rows_is_for_these_alone() -> None:
    for rows, is_wide in ((16, False), (64, False), (65, True), (2048, True)):
        assert (tile_for(rows, 256, 4096, 1, False) == WIDE) is is_wide
        assert (four_bit_tile(rows, 256, 4096, False) == WIDE) is is_wide
    assert tile_for(65, 256, 4096, 1, True) != WIDE
    assert tile_for(65, 256, 4096, 2, False) != WIDE


class Launches:
    """Stands for a kernel; keeps the grid and the keywords of its launches."""

    def __init__(self) -> None:
        self.grid: tuple[int, ...] = ()
        self.keywords: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*_: Any, **keywords: Any) -> None:
            self.grid, self.keywords = grid, keywords

        return launch


def eight_bit(groups: int) -> QuantizedWeight:
    values = torch.empty(256, 4096, dtype=torch.float8_e4m3fn, device="meta")
    return QuantizedWeight(values, torch.empty(256, groups, device="meta"))


def four_bit() -> FourBitWeight:
    codes = torch.empty(16, 32, 16, 64, dtype=torch.uint8, device="meta")
    words = torch.empty(32, 256, dtype=torch.int32, device="meta")
    return FourBitWeight(codes, words, (256, 4096), 128, "float16")


@pytest.mark.usefixtures("wide_tile")
@pytest.mark.parametrize(
    ("weight", "dtype", "rows", "block_rows"),
    [
        (eight_bit(1), torch.bfloat16, 200, 128),
        (eight_bit(1), torch.bfloat16, 64, 64),
        (eight_bit(1), torch.bfloat16, 16, 16),
        (eight_bit(1), torch.float32, 200, 64),
        (eight_bit(32), torch.bfloat16, 200, 64),
        (four_bit(), torch.bfloat16, 200, 128),
        (four_bit(), torch.float32, 200, 16),
    ],
)
def test_rows_of_a_program(
    weight: LinearWeight, dtype: torch.dtype, rows: int, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither float32 nor 8-bit weights in groups use the tile of more than 64 rows, which is not measured for them."""
    kernel = Launches()
    monkeypatch.setattr(products, "linear_kernel", kernel)
    products.linear(torch.empty(rows, 4096, dtype=dtype, device="meta"), weight)
    assert kernel.keywords["BLOCK_T"] == block_rows
    assert kernel.grid[1] == -(-rows // block_rows)
