"""Plots of simulations and plans, as PNG."""

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench.plots import COLOURS, load_pyplot
from paceline.planning.autoscaling.observation import ROLES
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import SimulationResult
from paceline.planning.sizing.plan import ClusterPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
