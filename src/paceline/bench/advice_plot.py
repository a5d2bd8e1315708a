"""A picture of advice: speed and tokens by depth, and where the time of a token goes."""

import io
from typing import TYPE_CHECKING

from paceline.cluster.cost.advice import Advice
from paceline.cluster.cost.cost import Prospect
from paceline.core.errors import MissingDependency

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#1f6feb", "#d9822b", "#2da44e", "#8250df", "#cf222e", "#0a7ea4", "#bf8700", "#57606a")
PARTS = (("draft", "#f0b37e"), ("verify", "#9aa5b1"), ("network", "#c8a6f0"))


def draw(advice: Advice, title: str) -> bytes:
    """A PNG."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingDependency("matplotlib", "drawing a plot", "bench") from None
    by_method: dict[str, list[Prospect]] = {}
    for one in advice.table[1:]:
        by_method.setdefault(one.method, []).append(one)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    _by_depth(left, by_method, advice, "speedup", "times plain decoding")
    left.axhline(1.0, color="#57606a", linewidth=1.0, linestyle="--", label="plain")
    left.set_title("Speed by depth", fontsize=10, loc="left")
    _by_depth(middle, by_method, advice, "tokens", "tokens a round")
    middle.set_title("Expected tokens a round", fontsize=10, loc="left")
    _times(right, advice.table[0], by_method)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=10, frameon=False, fontsize=9)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"{advice.verdict}\n{title}", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    pyplot.close(figure)
    return buffer.getvalue()


def _by_depth(axes: "Axes", by_method: dict[str, list[Prospect]], advice: Advice, field: str, label: str) -> None:
    """One line a method; a ring around the choice."""
    deepest = 1
    for i, (name, some) in enumerate(by_method.items()):
        depths = [one.depth for one in some]
        deepest = max(deepest, *depths)
        axes.plot(
            depths, [getattr(one, field) for one in some], "o-", ms=3.5, label=name, color=COLOURS[i % len(COLOURS)]
        )
    if advice.speculate:
        place = [advice.choice.depth], [getattr(advice.choice, field)]
        axes.plot(*place, "o", ms=11, mfc="none", mec="black", mew=1.4, label="recommended")
    axes.set_ylim(0, 1.12 * max(1.0, *(getattr(one, field) for some in by_method.values() for one in some)))
    axes.set_xticks(range(0, deepest + 1, 1 if deepest <= 16 else 4))
    axes.set_xlabel("depth")
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _times(axes: "Axes", baseline: Prospect, by_method: dict[str, list[Prospect]]) -> None:
    """Milliseconds of a token, plain and with each method at its best depth."""
    best = [max(some, key=lambda one: one.speedup) for some in by_method.values()]
    rows = [baseline, *sorted(best, key=lambda one: -one.speedup)]
    left = [0.0] * len(rows)
    for part, colour in PARTS:
        widths = [1000.0 * getattr(one, f"{part}_seconds") / one.tokens for one in rows]
        if any(widths):
            axes.barh(range(len(rows)), widths, 0.6, left, label=part, color=colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, (one, end) in enumerate(zip(rows, left, strict=True)):
        axes.text(end, i, f" {end:.2f} ms" + (f" ({one.speedup:.2f}x)" if one.depth else ""), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{one.method}, depth {one.depth}" if one.depth else one.method for one in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max(left))  # the widths of the labels
    axes.set_xlabel("milliseconds a token, each method at its best depth")
    axes.set_title("Where a token's time goes", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
