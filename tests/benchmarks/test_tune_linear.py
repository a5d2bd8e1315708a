"""benchmarks/gpu/tune_linear.py: its cases, the tiles it tries and the kernels it compiles."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline.kernels.gpu.tiles import RowClass, Tile

ROOT = Path(__file__).parents[2]
EVERY = [(name, row_class) for name in ("8b", "70b", "135m") for row_class in RowClass]


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import tune_linear

    return tune_linear


@pytest.fixture
def tuner(cases: ModuleType) -> ModuleType:
    import tune_linear

    return tune_linear


def test_the_most_important_matrix_is_first(cases: ModuleType) -> None:
    for row_class in RowClass:
        found = cases.cases_of(["70b"], [row_class], is_quick=True)
        assert [case.name for case in found] == ["70b gate_up", "70b down", "70b qkv", "70b o"]


def test_more_than_64_rows_are_plain_products_of_8_bit_weights(cases: ModuleType) -> None:
    found = cases.cases_of(["8b", "70b", "135m"], [RowClass.MORE], is_quick=False)
    assert {(case.kind, case.dtype, case.rows) for case in found} == {("product", torch.float8_e4m3fn, (128, 1024))}
    assert [case.key for case in found] == [
        f"rows {shape} bytes 1, more than 64 rows" for shape in ("57344x8192", "8192x28672", "10240x8192", "8192x8192")
    ]


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize(("name", "row_class"), EVERY)
def test_tiles_to_try(name: str, row_class: RowClass, is_quick: bool, cases: ModuleType) -> None:
    for case in cases.cases_of([name], [row_class], is_quick):
        first, *others = cases.tiles_of(case, is_quick)
        assert first == case.before
        assert len({first, *others}) == 1 + len(others) > 8
        assert all(tile.splits == 1 for tile in others) or case.kind in ("add_linear", "product")
        assert all((tile.rows > 0) == (row_class is RowClass.MORE) for tile in others)
        if row_class is not RowClass.UP_TO_16:
            assert all(cases.fits(tile, case.rows[1], case.dtype.itemsize) for tile in others)


def test_17_to_64_rows_try_narrow_tiles(cases: ModuleType) -> None:
    for case in cases.cases_of(["70b"], [RowClass.UP_TO_64], is_quick=False):
        found = set(cases.tiles_of(case, is_quick=False))
        assert {Tile(16, 256, 1, 3), Tile(16, 128, 2, 5), Tile(32, 128, 1, 4), Tile(32, 256, 2, 5)} <= found
        assert {Tile(64, 128, 4, 6), Tile(128, 128, 4, 3)} <= found


def test_more_than_64_rows_try_many_rows_in_a_program(cases: ModuleType) -> None:
    gate_up, down, *_ = cases.cases_of(["70b"], [RowClass.MORE], is_quick=False)
    found = set(cases.tiles_of(gate_up, is_quick=False))
    assert {(tile.rows, tile.outputs) for tile in found if tile.rows} == {
        (rows, outputs) for rows in (64, 128, 256) for outputs in (64, 128, 256) if rows * outputs <= 128 * 256
    }
    wide = Tile(128, 64, 8, 4, rows=256)
    assert wide in found
    assert replace(wide, splits=2) not in found  # 448 strips
    assert replace(wide, splits=2) in cases.tiles_of(down, is_quick=False)  # 64 strips


@pytest.mark.parametrize(
    ("tile", "rows", "itemsize", "nbytes"),
    [
        (Tile(64, 64, 4, 3, rows=64), 128, 1, 32768),
        (Tile(128, 128, 8, 3, rows=256), 128, 1, 229376),
        (Tile(256, 128, 8, 3, rows=128, splits=4), 128, 1, 163840),
        (Tile(32, 256, 2, 5), 64, 1, 163840),
        (Tile(64, 256, 4, 5), 64, 1, 229376),
        (Tile(128, 128, 4, 3), 32, 2, 122880),
        (Tile(32, 128, 2, 4), 32, 2, 49152),
    ],
)
def test_shared_memory_is_what_the_compiler_allocates(
    tile: Tile, rows: int, itemsize: int, nbytes: int, cases: ModuleType
) -> None:
    """Sizes from the metadata of kernels compiled for an H200."""
    assert cases.shared_bytes(tile, rows, itemsize) == nbytes


@pytest.mark.parametrize(
    "tile",
    [
        Tile(128, 128, 8, 4, rows=256),  # shared memory
        Tile(256, 64, 8, 3, rows=256),  # sums
        Tile(256, 128, 4, 3, rows=64),  # sums and weights
    ],
)
def test_tiles_that_are_too_large(tile: Tile, cases: ModuleType) -> None:
    assert not cases.fits(tile, 128, 1)


@pytest.mark.parametrize(("name", "row_class"), EVERY)
def test_every_kernel_is_compiled_once(name: str, row_class: RowClass, cases: ModuleType) -> None:
    found = cases.cases_of([name], [row_class], is_quick=False)
    compiled = [
        work.case.kernel(work.rows, tile) for work in cases.work_of(found, is_quick=False) for tile in work.tiles
    ]
    needed = {
        case.kernel(rows, tile) for case in found for rows in case.rows for tile in cases.tiles_of(case, is_quick=False)
    }
    assert len(compiled) == len(needed)
    assert set(compiled) == needed


def test_dense_weights_have_no_tiles_for_more_than_64_rows(tuner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tune_linear.py", "8b", "--classes", "more"])
    with pytest.raises(SystemExit):
        tuner.main()
