"""A picture of a run: speed by category, and alpha by position."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench.report import Report
from paceline.bench.summary import MIN_TRIALS
from paceline.core.errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#9aa5b1", "#1f6feb", "#d9822b")
"""The reference, speculation, the server compared with."""


def plot(report: Report, path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingDependency("matplotlib", "drawing a plot", "bench") from None
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.55 * max(5, len(report.categories) + 1)), width_ratios=(3, 2), layout="constrained"
    )
    _speeds(left, report)
    _alphas(right, report)
    figure.suptitle(str(report.about.get("title", "")), fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _speeds(axes: "Axes", report: Report) -> None:
    """Grouped bars, one group a category; the reference on top of each group, the factor behind the others."""
    rows = [*report.categories, "all"]
    height = 0.8 / len(report.contenders)
    reference = [_speed(report, 0, row) for row in rows]
    for i, contender in enumerate(report.contenders):
        speeds = [_speed(report, i, row) for row in rows]
        places = [row + (i - (len(report.contenders) - 1) / 2) * height for row in range(len(rows))]
        bars = axes.barh(places, speeds, height, label=contender.name, color=COLOURS[i % len(COLOURS)])
        labels = [
            f"{speed:.0f}" if i == 0 or not base else f"{speed:.0f}  ({speed / base:.2f}x)"
            for speed, base in zip(speeds, reference, strict=True)
        ]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("tokens per second of one request")
    axes.set_title("Speed by category", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)


def _speed(report: Report, contender: int, row: str) -> float:
    by_category = report.contenders[contender].by_category
    if row != "all":
        return by_category[row].tokens_per_second
    seconds = sum(summary.seconds for summary in by_category.values())
    return sum(summary.tokens for summary in by_category.values()) / seconds if seconds else 0.0


def _alphas(axes: "Axes", report: Report) -> None:
    """One thin line a category, a thick one for all together."""
    axes.set_title("Alpha by position", fontsize=10, loc="left")
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, given that all before were")
    axes.set_ylim(0, 1.02)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    speculative = next((contender for contender in report.contenders if contender.overall.drafted), None)
    if speculative is None:
        axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center", color="#666666")
        return
    deepest = 1
    lines = [*speculative.by_category.items(), ("all", speculative.overall)]
    for name, summary in lines:
        points = [(i, a.value) for i, a in enumerate(summary.alphas, 1) if a.trials >= MIN_TRIALS]
        if points:
            deepest = max(deepest, points[-1][0])
            style = {"color": "black", "linewidth": 2.5} if name == "all" else {"linewidth": 1.2, "alpha": 0.8}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=name, **style)
    axes.set_xticks(range(1, deepest + 1))
    axes.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)
