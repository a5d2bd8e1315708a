"""A picture of profiles: one bar a contender, and the floor that no round can get under."""

from collections.abc import Sequence
from pathlib import Path

from paceline.bench.profiling.profile import LABELS, PARTS, Profile
from paceline.core.errors import MissingDependency

COLOURS = {"draft": "#d9822b", "verify": "#1f6feb", "sample": "#2da44e", "gap": "#cf222e"}
NARROW = 0.06
"""A part with less than this share of the longest bar gets no figure of its own."""


def plot_profiles(profiles: Sequence[Profile], title: str, path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingDependency("matplotlib", "drawing a plot", "bench") from None
    figure, axes = pyplot.subplots(figsize=(10, 1.9 + 0.8 * len(profiles)), layout="constrained")
    longest = max(one.seconds for one in profiles)
    left = [0.0] * len(profiles)
    for part in PARTS:
        shares = [next(share for share in one.parts if share.part == part) for one in profiles]
        widths = [1000.0 * share.seconds for share in shares]
        bars = axes.barh(range(len(profiles)), widths, 0.55, left, label=LABELS[part], color=COLOURS[part])
        figures = [f"{s.fraction:.0%}" if s.seconds > NARROW * longest else "" for s in shares]
        axes.bar_label(bars, figures, label_type="center", fontsize=9, color="white")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, one in enumerate(profiles):
        floor = 1000.0 * one.floor_seconds
        label = "bandwidth floor" if i == 0 else None
        axes.plot([floor, floor], [i - 0.36, i + 0.36], color="black", linewidth=2.0, label=label)
        text = f" {1000.0 * one.seconds:.2f} ms, floor {floor:.2f} ms ({one.floor_fraction:.0%})"
        axes.text(left[i], i, text, va="center", fontsize=9)
    axes.set_yticks(range(len(profiles)), [one.name for one in profiles])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(1000.0 * longest, *(1000.0 * one.floor_seconds for one in profiles)))
    axes.set_xlabel("milliseconds of a round, mean")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
