"""Plots of bench reports, profiles, advice, simulations and plans, as PNG."""

import io
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import MissingDependency
from paceline.planning import ROLES
from paceline.planning.planner import ClusterPlan
from paceline.planning.simulator import Objective, SimulationResult
from paceline.policy.cost.advice import Advice
from paceline.policy.cost.cost import Estimate
from paceline.tools.bench import MIN_TRIALS, Report
from paceline.tools.profile import LABELS, PARTS, Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#9aa5b1", "#1f6feb", "#d9822b")
"""Colours of the reference, of speculation, and of another server."""


def plot_report(report: Report, path: Path) -> None:
    """Speed by category and alpha by position."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.55 * max(5, len(report.categories) + 1)), width_ratios=(3, 2), layout="constrained"
    )
    _speeds(left, report)
    _alphas(right, report)
    figure.suptitle(str(report.about.get("title", "")), fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _speeds(axes: "Axes", report: Report) -> None:
    """Grouped bars by category. The label of each contender but the reference holds the ratio to the reference."""
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
    """One thin line per category and a thick one for all."""
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
    max_depth = 0
    lines = [*speculative.by_category.items(), ("all", speculative.overall)]
    for name, summary in lines:
        points = [(i, a.value) for i, a in enumerate(summary.alphas, 1) if a.trials >= MIN_TRIALS]
        if points:
            max_depth = max(max_depth, points[-1][0])
            style = {"color": "black", "linewidth": 2.5} if name == "all" else {"linewidth": 1.2, "alpha": 0.8}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=name, **style)
    if not max_depth:
        text = f"fewer than {MIN_TRIALS} drafts: measure more prompts or tokens"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color="#666666")
        return
    axes.set_xticks(range(1, max_depth + 1))
    axes.legend(frameon=False, fontsize=8, loc="lower left", ncols=2)


PART_COLOURS = {"draft": "#d9822b", "verify": "#1f6feb", "sample": "#2da44e", "gap": "#cf222e"}
NARROW = 0.06
"""Share of the longest bar below which a part has no label."""


def plot_profiles(profiles: Sequence[Profile], title: str, path: Path) -> None:
    """One bar per contender, with the bandwidth floor."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 1.9 + 0.8 * len(profiles)), layout="constrained")
    longest = max(profile.seconds for profile in profiles)
    left = [0.0] * len(profiles)
    for part in PARTS:
        shares = [next(share for share in profile.parts if share.part == part) for profile in profiles]
        widths = [1000.0 * share.seconds for share in shares]
        bars = axes.barh(range(len(profiles)), widths, 0.55, left, label=LABELS[part], color=PART_COLOURS[part])
        figures = [f"{s.fraction:.0%}" if s.seconds > NARROW * longest else "" for s in shares]
        axes.bar_label(bars, figures, label_type="center", fontsize=9, color="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, profile in enumerate(profiles):
        floor = 1000.0 * profile.floor_seconds
        label = "bandwidth floor" if i == 0 else None
        axes.plot([floor, floor], [i - 0.36, i + 0.36], color="black", linewidth=2.0, label=label)
        text = f" {1000.0 * profile.seconds:.2f} ms, floor {floor:.2f} ms ({profile.floor_fraction:.0%})"
        axes.text(left[i], i, text, va="center", fontsize=9)
    axes.set_yticks(range(len(profiles)), [profile.name for profile in profiles])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(1000.0 * longest, *(1000.0 * profile.floor_seconds for profile in profiles)))
    axes.set_xlabel("milliseconds of a round, mean")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


METHOD_COLOURS = ("#1f6feb", "#d9822b", "#2da44e", "#8250df", "#cf222e", "#0a7ea4", "#bf8700", "#57606a")
TIMES = (("draft", "#f0b37e"), ("verify", "#9aa5b1"), ("network", "#c8a6f0"))


def plot_advice(advice: Advice, title: str) -> bytes:
    """Speed and tokens by depth, and the time of a token by part, as PNG."""
    pyplot = load_pyplot()
    by_method: dict[str, list[Estimate]] = {}
    for prospect in advice.table[1:]:
        by_method.setdefault(prospect.method, []).append(prospect)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    _by_depth(left, by_method, advice, "speedup", "times plain decoding")
    left.axhline(1.0, color="#57606a", linewidth=1.0, linestyle="--", label="plain")
    left.set_title("Speed by depth", fontsize=10, loc="left")
    _by_depth(middle, by_method, advice, "tokens", "tokens per round")
    middle.set_title("Expected tokens per round", fontsize=10, loc="left")
    _times(right, advice.table[0], by_method)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=10, frameon=False, fontsize=9)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"{advice.verdict}\n{title}", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    pyplot.close(figure)
    return buffer.getvalue()


def _by_depth(axes: "Axes", by_method: dict[str, list[Estimate]], advice: Advice, field: str, label: str) -> None:
    """One line per method. A ring marks the recommendation."""
    max_depth = 1
    for i, (name, some) in enumerate(by_method.items()):
        depths = [prospect.depth for prospect in some]
        max_depth = max(max_depth, *depths)
        axes.plot(
            depths,
            [getattr(prospect, field) for prospect in some],
            "o-",
            ms=3.5,
            label=name,
            color=METHOD_COLOURS[i % len(METHOD_COLOURS)],
        )
    if advice.speculate:
        point = [advice.choice.depth], [getattr(advice.choice, field)]
        axes.plot(*point, "o", ms=11, mfc="none", mec="black", mew=1.4, label="recommended")
    axes.set_ylim(0, 1.12 * max(1.0, *(getattr(prospect, field) for some in by_method.values() for prospect in some)))
    axes.set_xticks(range(0, max_depth + 1, 1 if max_depth <= 16 else 4))
    axes.set_xlabel("depth")
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _times(axes: "Axes", baseline: Estimate, by_method: dict[str, list[Estimate]]) -> None:
    """Milliseconds per token, plain and with each method at its best depth."""
    best = [max(some, key=lambda prospect: prospect.speedup) for some in by_method.values()]
    rows = [baseline, *sorted(best, key=lambda prospect: -prospect.speedup)]
    left = [0.0] * len(rows)
    for part, colour in TIMES:
        widths = [1000.0 * getattr(row, f"{part}_seconds") / row.tokens for row in rows]
        if any(widths):
            axes.barh(range(len(rows)), widths, 0.6, left, label=part, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, (row, end) in enumerate(zip(rows, left, strict=True)):
        axes.text(end, i, f" {end:.2f} ms" + (f" ({row.speedup:.2f}x)" if row.depth else ""), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row.method}, depth {row.depth}" if row.depth else row.method for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(left))  # space for the labels
    axes.set_xlabel("milliseconds per token, each method at its best depth")
    axes.set_title("Time of a token by part", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def load_pyplot() -> Any:
    """matplotlib.pyplot, for files only. Raises a typed error without the package."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingDependency("matplotlib", "plotting", "bench") from None
    return pyplot


PLACEMENTS = {"none": "no drafts", "device": "drafts on the target's device", "pool": "draft pool"}


def plot_simulation(result: SimulationResult, objective: Objective) -> bytes:
    """Distributions of TTFT and TPOT, and the utilisation of every worker, by role."""
    pyplot = load_pyplot()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    _distribution(left, "Time to first token", [job.ttft for job in result.jobs], objective.ttft)
    tpot = [job.tpot for job in result.jobs if job.output_tokens > 1]
    _distribution(middle, "Time per token after the first", tpot, objective.tpot)
    for role, colour in zip(ROLES, COLOURS, strict=False):
        some = [(i, worker) for i, worker in enumerate(result.workers) if worker.role == role]
        shares = [worker.busy_seconds / worker.seconds if worker.seconds else 0.0 for _, worker in some]
        if some:
            right.bar([i for i, _ in some], shares, color=colour, label=role)
    right.set_ylim(0, 1)
    right.set_xlabel("worker")
    right.legend(frameon=False, fontsize=9)
    right.set_title("Utilisation", fontsize=10, loc="left")
    right.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result.trace}, {len(result.jobs)} requests, {result.config.workers} target workers", fontsize=11)
    return _png(figure)


def _png(figure: "Figure") -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    load_pyplot().close(figure)
    return buffer.getvalue()


def _distribution(axes: "Axes", title: str, seconds: Sequence[float], limit: float) -> None:
    """The share of requests up to each time."""
    ordered = sorted(1000.0 * max(1e-6, value) for value in seconds)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    axes.step(ordered, shares, where="post", color=COLOURS[1], linewidth=1.8)
    if math.isfinite(limit):
        axes.axvline(1000.0 * limit, color=COLOURS[2], linestyle="--", linewidth=1.2, label="objective")
        axes.legend(frameon=False, fontsize=9)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.01)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of requests")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def plot_plan(plan: ClusterPlan, title: str, path: Path) -> None:
    """Every simulated cluster: dollars an hour against the time per token. A ring marks the choice."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(7.5, 4.6), layout="constrained")
    for (placement, label), colour in zip(PLACEMENTS.items(), COLOURS, strict=True):
        some = [evaluation for evaluation in plan.evaluations if evaluation.candidate.placement == placement]
        if some:
            prices = [evaluation.candidate.dollars_per_hour for evaluation in some]
            times = [1000.0 * evaluation.report.tpot.p99 for evaluation in some]
            axes.scatter(prices, times, s=26, color=colour, label=label)
    chosen = plan.choice
    point = [chosen.candidate.dollars_per_hour], [1000.0 * chosen.report.tpot.p99]
    axes.plot(*point, "o", ms=12, mfc="none", mec="black", mew=1.4, label="choice", linestyle="none")
    axes.set_yscale("log")
    axes.set_xlabel("dollars an hour")
    axes.set_ylabel("milliseconds per token, p99")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
