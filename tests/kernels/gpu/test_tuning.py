"""Whole runs of benchmarks/gpu/tune_linear.py with small matrices and two tiles.

Times are invented: a tile's number of outputs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.kernels.gpu.tiles import RowClass, Tile
from tests.kernels.gpu.cases import DEVICE

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "gpu"
TILES = [Tile(32, 64, 4, 3, rows=128), Tile(16, 64, 4, 3, rows=128)]
OTHER = {"other": [1, 2, 3, 4, 5, 6, 7]}
SHAPES = "192x64", "64x96", "128x64", "64x64"


class Tuning:
    def __init__(self, tuner: ModuleType, cases: ModuleType, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.tuner, self.patch, self.file = tuner, patch, folder / "tiles.json"
        self.file.write_text(json.dumps(OTHER))
        patch.setitem(cases.SHAPES, "70b", (64, 4, 2, 16, 96))
        patch.setitem(cases.ROWS, RowClass.MORE, (65, 80))
        patch.setattr(tuner, "tiles_of", lambda case, is_quick: TILES)
        patch.setattr(tuner, "MEASURED", self.file)
        patch.setattr(tuner, "DEVICE", str(DEVICE))
        patch.setattr(tuner, "microseconds", microseconds)
        patch.setattr(tuner, "compile_all", compile_all)

    def run(self, *arguments: str) -> dict[str, list[int]]:
        self.patch.setattr("sys.argv", ["tune_linear.py", "70b", *arguments])
        self.tuner.main()
        found: dict[str, list[int]] = json.loads(self.file.read_text())
        return found


def microseconds(call: Callable[[Any], object], arguments: list[Any], calls: int) -> float:
    call(arguments[0])
    tile = getattr(call, "keywords", {}).get("tile")
    return 1.0 if tile is None else float(tile.outputs)


def compile_all(tasks: list[Any], seconds: float) -> set[tuple[object, ...]]:
    return {task.case.kernel(task.rows, tile) for task in tasks for tile in TILES}


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tuning:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tune_linear

    return Tuning(tune_linear, tune_linear, monkeypatch, tmp_path)


def test_the_fastest_tile_of_every_case_is_written(tuning: Tuning, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tuning.file.with_name("copy.json")
    found = tuning.run("--classes", "more", "--out", str(copy))
    assert found == OTHER | {f"rows {shape} bytes 1, more than 64 rows": [16, 64, 4, 3, 2, 1, 128] for shape in SHAPES}
    assert copy.read_text() == tuning.file.read_text()
    shown = capsys.readouterr().out
    assert shown.count("conversion to bf16, then the vendor's product") == len(SHAPES)
    assert shown.count("the vendor's product, bf16 weights") == len(SHAPES)
    assert "WRONG" not in shown


def test_every_kind_of_product_runs(tuning: Tuning, capsys: pytest.CaptureFixture[str]) -> None:
    found = tuning.run("--classes", "16", "64", "--quick")
    kinds = "pairs 192x64", "rows 64x96", "pairs 128x64", "rows 64x64"
    classes = "up to 16 rows", "17 to 64 rows"
    assert set(found) == {*OTHER, *(f"{kind} bytes 1, {name}" for kind in kinds for name in classes)}
    assert "vendor" not in capsys.readouterr().out


def test_a_wrong_product_does_not_count(tuning: Tuning, capsys: pytest.CaptureFixture[str]) -> None:
    right = tuning.tuner.linear

    def wrong(x: torch.Tensor, weight: object, tile: Tile) -> Any:
        return right(x, weight, tile=tile) * (1.1 if tile.outputs == 16 else 1.0)

    tuning.patch.setattr(tuning.tuner, "linear", wrong)
    assert tuning.run("--classes", "more")["rows 64x64 bytes 1, more than 64 rows"][0] == 32
    assert "WRONG RESULT" in capsys.readouterr().out


def test_tiles_that_are_not_compiled_are_not_measured(tuning: Tuning, capsys: pytest.CaptureFixture[str]) -> None:
    tuning.patch.setattr(tuning.tuner, "compile_all", lambda tasks, seconds: compile_all(tasks[:1], seconds))
    assert set(tuning.run("--classes", "more")) == {
        *OTHER,
        *(
            f"rows {shape} bytes 1, more than 64 rows" for shape in SHAPES if shape != "64x96"
        ),  # the kernels of 64 inputs
    }


def test_without_time_nothing_changes(tuning: Tuning, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning.run("--classes", "more", "--seconds", "0") == OTHER
    assert capsys.readouterr().out.count("not measured") == len(SHAPES)
