"""Alpha and tokens per round over the versions of a learner, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import MissingDependency
from paceline.learning.versions import Lineage

PLOT = "learning.png"
COLOURS = {"kept": "#2a7f3f", "refused": "#b03030", "candidate": "#777777"}


def plot_versions(lineages: Sequence[Lineage], path: Path) -> None:
    """Every version has two marks: its parent on the same held-out samples, and itself."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise MissingDependency("matplotlib", "plotting", "bench") from None
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    pairs = (
        ("Alpha of the first draft", "alpha_before", "alpha_after"),
        ("Tokens per round, chain", "tokens_per_round_before", "tokens_per_round_after"),
    )
    for axis, (title, before, after) in zip(axes, pairs, strict=True):
        numbers = [lineage.version for lineage in lineages]
        axis.plot(
            numbers,
            [getattr(lineage, before) for lineage in lineages],
            "o",
            mfc="none",
            color="#777777",
            label="parent",
        )
        for status, colour in COLOURS.items():
            chosen = [lineage for lineage in lineages if lineage.status == status]
            if chosen:
                axis.plot(
                    [lineage.version for lineage in chosen],
                    [getattr(lineage, after) for lineage in chosen],
                    "o",
                    color=colour,
                    label=status,
                )
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("version")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
