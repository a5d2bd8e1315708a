"""Where a draft pool pays: the cheapest way to draft by alpha and sequences of a target, by the planner's cost model.

python benchmarks/planner/draft_pool_map.py [--plot docs/draft_pool_map.png]
"""

import argparse
from dataclasses import replace
from pathlib import Path

from paceline.planning.planner.capacity import placements
from paceline.planning.profile import ProfileValue, load_profile
from paceline.planning.simulator.settings.config import Speculation
from paceline.tools.plots.plots import load_pyplot

H200 = load_profile("h200-8b")
BATCHES, ALPHAS, RATIOS = (1, 4, 16, 64, 128, 256), (0.5, 0.6, 0.7, 0.8, 0.9), (0.05, 0.1, 0.3, 1.0)


def cheapest(batch: int, alpha: float, ratio: float) -> tuple[str, float]:
    """The planner's placement for targets with `batch` sequences each, and dollars relative to plain decoding."""
    profile = replace(
        H200, draft_price_per_hour=ProfileValue(ratio * H200.price_per_hour.value, "assumed", "draft_pool_map.py")
    )
    best = placements(profile, Speculation((alpha,), 8), batch, batch * 500)[0]
    name = f"pool 1:{best.targets_per_draft}" if best.placement == "pool" else best.placement
    return name, best.cost


def print_map() -> None:
    """The cheapest way to draft, and its cost per token relative to plain decoding."""
    print("Rows: alpha. Columns: sequences of a target. `pool 1:n` is one draft worker for n targets.")
    for ratio in RATIOS:
        print(f"\nA draft GPU costs {ratio:g} of a target GPU:\n")
        print("| alpha | " + " | ".join(map(str, BATCHES)) + " |\n|---|" + "---|" * len(BATCHES))
        for alpha in ALPHAS:
            cells = [cheapest(batch, alpha, ratio) for batch in BATCHES]
            print(f"| {alpha} | " + " | ".join(f"{name}, {cost:.2f}" for name, cost in cells) + " |")


def plot_map(path: Path) -> None:
    pyplot = load_pyplot()
    kinds = {"none": 0, "device": 1, "pool": 2}
    figure, axes = pyplot.subplots(1, len(RATIOS), figsize=(15, 3.6), layout="constrained", sharey=True)
    for chart, ratio in zip(axes, RATIOS, strict=True):
        grid = [[cheapest(batch, alpha, ratio) for batch in BATCHES] for alpha in ALPHAS]
        chart.imshow(
            [[kinds[name.split()[0]] for name, _ in row] for row in grid], cmap="Blues", vmin=0, vmax=3, origin="lower"
        )
        for y, row in enumerate(grid):
            for x, (name, cost) in enumerate(row):
                chart.text(x, y, f"{name.removeprefix('pool ')}\n{cost:.2f}", ha="center", va="center", fontsize=7)
        chart.set_xticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
        chart.set_yticks(range(len(ALPHAS)), [str(alpha) for alpha in ALPHAS])
        chart.set_xlabel("sequences of a target")
        chart.set_title(f"draft GPU at {ratio:g} of the target's price", fontsize=9)
    axes[0].set_ylabel("alpha")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw the map")
    options = parser.parse_args()
    print_map()
    if options.plot is not None:
        plot_map(options.plot)


if __name__ == "__main__":
    main()
