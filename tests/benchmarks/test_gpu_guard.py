"""benchmarks/gpu/gpu_guard.py: what it reads from the output of gpu.py, and the table it prints."""

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
OUTPUT = """inflate:llama-8b?base=m&noise=0.06, draft m: ready after 31.0 s
plain: 3.950 ms a token, floor 3.340 (0.85), picking 0.020, CPU gap 0.2%
depth 4: 1.970 ms a token, 2.00x plain (1.99x over all tokens); alpha 0.789
batch 64, mean context 512: 5.380 ms a step, on the device 5.300
batch   1: plain      254 tok/s, goodput      519, ratio 2.04 (2.01 to 2.05), depth 5.00, alpha 0.80, whole runs 1.99
batch  64: plain    11465 tok/s, goodput    16594, ratio 1.45 (1.43 to 1.46), depth 3.00, alpha 0.85, whole runs 1.15
"""


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import gpu_guard

    return gpu_guard


def test_figures_are_read_from_the_output(guard: ModuleType) -> None:
    assert guard.read_figures(OUTPUT, ["plain", "spec", "batch"]) == {
        "8B plain, ms/token": 3.95,
        "8B depth 4, ms/token": 1.97,
        "8B batch 64, context 512, ms/step": 5.38,
    }
    sweep = guard.read_figures(OUTPUT, ["sweep"])
    assert sweep["sweep 1: goodput / plain"] == 2.04
    assert sweep["sweep 64: goodput tok/s"] == 16594
    assert "sweep 256: goodput / plain" not in sweep


def test_one_line_belongs_to_the_group_that_ran(guard: ModuleType) -> None:
    assert guard.read_figures(OUTPUT, ["large"]) == {"70B FP8 plain, ms/token": 3.95}


@pytest.mark.parametrize(
    ("name", "now", "verdict"),
    [
        ("8B plain, ms/token", 3.95, "ok"),
        ("8B plain, ms/token", 4.02, "ok"),
        ("8B plain, ms/token", 4.04, "WORSE"),
        ("8B plain, ms/token", 3.80, "better"),
        ("sweep 1: goodput / plain", 1.90, "WORSE"),
        ("sweep 1: goodput / plain", 2.20, "better"),
        ("sweep 1: goodput / plain", None, "not measured"),
    ],
)
def test_verdict_depends_on_the_direction(guard: ModuleType, name: str, now: float | None, verdict: str) -> None:
    baseline = {"8B plain, ms/token": 3.95, "sweep 1: goodput / plain": 2.04}
    rows = guard.compare(baseline, {} if now is None else {name: now}, guard.GROUPS)
    assert next(row for row in rows if row.figure.name == name).verdict() == verdict


def test_table_has_one_line_per_figure_of_the_chosen_groups(guard: ModuleType) -> None:
    rows = guard.compare({"8B plain, ms/token": 4.0}, {"8B plain, ms/token": 4.2}, ["plain", "spec"])
    assert guard.table(rows).splitlines()[2:] == [
        "| 8B plain, ms/token | 4.000 | 4.200 | 1.050 | WORSE |",
        "| 8B depth 4, ms/token | - | - | - | not measured |",
    ]


def test_stored_baseline_keeps_figures_of_other_groups(guard: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    guard.store_baseline(path, {"a": 1.0, "b": 2.0})
    guard.store_baseline(path, {"b": 3.0})
    assert guard.load_baseline(path) == {"a": 1.0, "b": 3.0}


def test_shipped_baseline_covers_every_figure(guard: ModuleType) -> None:
    assert set(guard.load_baseline(guard.BASELINE)) == {figure.name for figure in guard.FIGURES}


def test_groups_with_the_same_engine_share_one_process(guard: ModuleType) -> None:
    options = guard.parse(["--prompts", "p.jsonl", "--groups", "spec,plain,eagle"])
    first, second = guard.commands(options.groups, options)
    assert first[0] == ["plain", "spec"]
    assert first[1][:2] == ["plain", "spec"]
    assert second[0] == ["eagle"]


def test_trees_alternate_and_medians_count(guard: ModuleType, tmp_path: Path) -> None:
    """Two trees whose gpu.py prints a constant: each runs with its own src on the path."""
    for tree, value in (("before", 4.0), ("after", 2.0)):
        (tmp_path / tree / "benchmarks").mkdir(parents=True)
        (tmp_path / tree / "src").mkdir()
        (tmp_path / tree / "src" / "marker.py").write_text(f"value = {value}\n")
        (tmp_path / tree / "benchmarks" / "gpu.py").write_text("import marker\nprint(f'plain: {marker.value} ms')\n")
    options = guard.parse(["--prompts", "p.jsonl", "--groups", "plain", "--rounds", "2"])
    trees = [guard.tree_of(tmp_path / "before" / "src"), guard.tree_of(tmp_path / "after")]
    before, after = guard.measure_trees(trees, options)
    [row] = guard.compare(before, after, ["plain"])
    assert (row.ratio, row.verdict()) == (0.5, "better")


def test_unknown_group_is_an_error(guard: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        guard.parse(["--prompts", "p.jsonl", "--groups", "plan"])
    assert "unknown groups plan" in capsys.readouterr().err
