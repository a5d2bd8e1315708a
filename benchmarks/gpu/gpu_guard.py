"""Compare the headline GPU figures with a stored baseline, or with another source tree, in one run.

    python benchmarks/gpu/gpu_guard.py --base MODEL --prompts PROMPTS
    python benchmarks/gpu/gpu_guard.py --base MODEL --prompts PROMPTS --groups plain,spec,batch --write
    python benchmarks/gpu/gpu_guard.py --base MODEL --prompts PROMPTS --against OTHER_TREE/src

Every group runs `benchmarks/gpu/gpu.py` of the measured tree in a process, with that tree's `src` on PYTHONPATH, and
reads the figures from its output. One run takes under 8 minutes on an H200. With --against the two trees alternate,
group by group.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASELINE = HERE / "gpu_baseline.json"
GROUPS = ("plain", "spec", "batch", "eagle", "sweep", "large")
TOLERANCE = 0.02
NUMBER = r"([\d.]+)"


@dataclass(frozen=True)
class Figure:
    """One number of `gpu.py`'s output."""

    group: str
    name: str
    pattern: str
    """Regular expression of its line; group 1 is the number."""
    is_lower_better: bool = True


def _sweep(size: int) -> tuple[Figure, Figure]:
    line = rf"^batch +{size}: "
    return (
        Figure("sweep", f"sweep {size}: goodput / plain", rf"{line}.*ratio {NUMBER}", is_lower_better=False),
        Figure("sweep", f"sweep {size}: goodput tok/s", rf"{line}.*goodput +{NUMBER}", is_lower_better=False),
    )


FIGURES = (
    Figure("plain", "8B plain, ms/token", rf"^plain: {NUMBER} ms"),
    Figure("spec", "8B depth 4, ms/token", rf"^depth 4: {NUMBER} ms"),
    Figure("batch", "8B batch 64, context 512, ms/step", rf"^batch 64, mean context 512: {NUMBER} ms"),
    Figure("eagle", "8B EAGLE tree of 31, ms/token", rf"^depth 31: {NUMBER} ms"),
    Figure("eagle", "8B EAGLE tree of 15, ms/token", rf"^depth 15: {NUMBER} ms"),
    *(figure for size in (1, 64, 256) for figure in _sweep(size)),
    Figure("large", "70B FP8 plain, ms/token", rf"^plain: {NUMBER} ms"),
    Figure("large", "70B FP8 depth 7, ms/token", rf"^depth 7: {NUMBER} ms"),
)


@dataclass(frozen=True)
class Row:
    """One figure next to its baseline."""

    figure: Figure
    baseline: float | None
    now: float | None

    @property
    def ratio(self) -> float | None:
        """now / baseline; None if either is missing."""
        return self.now / self.baseline if self.now is not None and self.baseline else None

    def verdict(self, tolerance: float = TOLERANCE) -> str:
        if self.now is None:
            return "not measured"
        if self.ratio is None:
            return "no baseline"
        if abs(self.ratio - 1) <= tolerance:
            return "ok"
        return "better" if (self.ratio < 1) == self.figure.is_lower_better else "WORSE"


def commands(groups: Iterable[str], options: argparse.Namespace) -> list[tuple[list[str], list[str]]]:
    """(groups, arguments of gpu.py) of every process. Groups with the same engine share one."""
    chosen = [group for group in GROUPS if group in set(groups)]
    shared = [group for group in chosen if group in ("plain", "spec", "batch")]
    stream = ["--count", str(options.count), "--tokens", "96"]
    result = []
    if shared:
        result.append((shared, [*shared, *stream, "--depth", "4"]))
    if "eagle" in chosen:
        head = ["--largest", "1", "--noise", "0", "--draft", options.eagle, "--depth", "31", "--depth", "15"]
        result.append((["eagle"], ["plain", "spec", *head, *stream]))
    if "sweep" in chosen:
        result.append((["sweep"], ["sweep", "--tokens", "128", "--repeats", str(options.repeats)]))
    if "large" in chosen:
        large = ["--largest", "1", "--shape", "llama-70b", "--quantization", "fp8", "--depth", "7"]
        result.append((["large"], ["plain", "spec", *large, *stream]))
    files = ["--base", options.base, "--prompts", str(options.prompts.resolve())]
    return [(names, [*arguments, *files]) for names, arguments in result]


def read_figures(output: str, groups: Iterable[str]) -> dict[str, float]:
    """The figures of these groups found in `gpu.py`'s output, by name."""
    found = {}
    for figure in FIGURES:
        match = re.search(figure.pattern, output, re.MULTILINE) if figure.group in groups else None
        if match:
            found[figure.name] = float(match[1])
    return found


def measure(tree: Path, groups: list[str], arguments: list[str]) -> dict[str, float]:
    """Run one process of this tree's `gpu.py`. A failure prints its output and leaves its figures out."""
    command = [sys.executable, str(script_of(tree)), *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    print(f"\n{tree.name}: gpu.py {' '.join(arguments)}", flush=True)
    lines = []
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(f"  {line}", end="", flush=True)
    status = process.returncode
    print(f"  exit status {status} after {time.monotonic() - started:.0f} s", flush=True)
    return read_figures("".join(lines), groups)


def measure_trees(trees: list[Path], options: argparse.Namespace) -> list[dict[str, float]]:
    """The medians of every tree. The order of the trees is reversed in every other round."""
    samples: list[dict[str, list[float]]] = [{} for _ in trees]
    for groups, arguments in commands(options.groups, options):
        for number in range(options.rounds):
            order = list(range(len(trees)))
            for i in order[::-1] if number % 2 else order:
                for name, value in measure(trees[i], groups, arguments).items():
                    samples[i].setdefault(name, []).append(value)
    return [{name: median(values) for name, values in each.items()} for each in samples]


def compare(baseline: Mapping[str, float], now: Mapping[str, float], groups: Iterable[str]) -> list[Row]:
    chosen = set(groups)
    return [
        Row(figure, baseline.get(figure.name), now.get(figure.name)) for figure in FIGURES if figure.group in chosen
    ]


def table(rows: Iterable[Row], tolerance: float = TOLERANCE, first: str = "baseline", second: str = "now") -> str:
    """A Markdown table of the rows."""

    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3f}"

    lines = [f"| figure | {first} | {second} | ratio | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        cells = (row.figure.name, show(row.baseline), show(row.now), ratio, row.verdict(tolerance))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def load_baseline(path: Path) -> dict[str, float]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def store_baseline(path: Path, now: Mapping[str, float]) -> None:
    """Replaces the figures measured now; figures of other groups stay."""
    path.write_text(json.dumps(load_baseline(path) | dict(now), indent=2) + "\n", "utf-8")


def tree_of(path: Path) -> Path:
    """The root of a source tree, given as itself or as its `src`."""
    path = path.resolve()
    tree = path.parent if path.name == "src" else path
    if script_of(tree) is None:
        raise SystemExit(f"{path} has no benchmarks/gpu/gpu.py; give the src folder of a Paceline checkout")
    return tree


def script_of(tree: Path) -> Path | None:
    """The tree's gpu.py. None if it has none."""
    return next((tree / "benchmarks").rglob("gpu.py"), None)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2", help="model whose text the inflated targets have")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's spec_bench_dev.jsonl")
    parser.add_argument("--eagle", default="smollm2-eagle", help="EAGLE head of the group eagle")
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"comma-separated; default {','.join(GROUPS)}")
    parser.add_argument("--count", type=int, default=9, help="prompts of one stream")
    parser.add_argument("--repeats", type=int, default=3, help="timed pairs of every batch size of the sweep")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every group; the median counts")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest relative difference called ok")
    parser.add_argument("--against", type=Path, metavar="SRC", help="src folder of another tree: measure both")
    parser.add_argument("--write", action="store_true", help=f"store the figures in {BASELINE.name}")
    options = parser.parse_args(arguments)
    options.groups = options.groups.split(",")
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"unknown groups {', '.join(sorted(unknown))}; choose from {', '.join(GROUPS)}")
    return options


def main() -> None:
    options = parse()
    if options.against is not None:
        before, now = measure_trees([tree_of(options.against), ROOT], options)
        rows = compare(before, now, options.groups)
        print("\n" + table(rows, options.tolerance, "before", "after"))
    else:
        [now] = measure_trees([ROOT], options)
        rows = compare(load_baseline(BASELINE), now, options.groups)
        print("\n" + table(rows, options.tolerance))
    if options.write:
        store_baseline(BASELINE, now)
    sys.exit(any(row.verdict(options.tolerance) in ("WORSE", "not measured") for row in rows))


if __name__ == "__main__":
    main()
