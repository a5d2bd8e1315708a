"""The picture on a card: what more training would buy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import MissingDependency


def plot_curve(curve: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Alpha by position and tokens a round, on held-out text, against training tokens."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import EngFormatter, MaxNLocator
    except ImportError:
        raise MissingDependency("matplotlib", "drawing a plot", "bench") from None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    tokens = [point["tokens"] for point in curve]
    for position in range(max((len(point["alphas"]) for point in curve), default=0)):
        left.plot(
            tokens, [point["alphas"][position] for point in curve], marker="o", markersize=3, label=f"{position + 1}"
        )
    left.set_ylim(bottom=0.0)
    left.set_title("Alpha by position", fontsize=10, loc="left")
    left.legend(frameon=False, fontsize=8, ncols=5, title="position", title_fontsize=8)
    right.plot(tokens, [point["tokens_a_round"] for point in curve], marker="o", markersize=3, label="chain")
    right.plot(tokens, [point["tree_tokens_a_round"] for point in curve], marker="o", markersize=3, label="tree")
    right.set_ylim(bottom=1.0)
    right.set_title("Tokens a round", fontsize=10, loc="left")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("training tokens")
        axes.xaxis.set_major_formatter(EngFormatter())
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
