"""Draws docs/goodput.png, a picture in the README, from the table of benchmarks/gpu.md that a sweep printed.

python docs/pictures/goodput.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).parent.parent
PLAIN, GOODPUT = "#9aa5b1", "#1f6feb"


def table(lines: list[str]) -> dict[str, list[str]]:
    """The rows of the first table that begins with `batch`, by their names."""
    start = next(i for i, line in enumerate(lines) if line.startswith("| batch |"))
    rows: dict[str, list[str]] = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def main() -> None:
    rows = table((DOCS.parent / "benchmarks" / "gpu.md").read_text().splitlines())
    batches, places = rows["batch"], range(len(rows["batch"]))
    plain, goodput = ([float(cell) for cell in rows[f"{name}, tok/s"]] for name in ("plain", "goodput"))
    ratios = rows["goodput / plain, median of 5"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    left.plot(places, plain, "o-", color=PLAIN, label="plain")
    left.plot(places, goodput, "o-", color=GOODPUT, label="goodput")
    left.set_yscale("log")
    left.set_ylabel("tokens per second")
    left.set_title("8B on one H200, draft of 135M", fontsize=10, loc="left")
    left.legend(frameon=False)
    bars = right.bar(places, [float(ratio) for ratio in ratios], color=GOODPUT)
    labels = [f"{ratio}x\n({depth})" for ratio, depth in zip(ratios, rows["mean depth"], strict=True)]
    right.bar_label(bars, labels, padding=2, fontsize=8)
    right.axhline(1.0, color="#57606a", linewidth=1.0, linestyle="--")
    right.set_ylim(0, 2.7)
    right.set_ylabel("times plain decoding")
    right.set_title("What speculation brings (and the mean depth it chose)", fontsize=10, loc="left")
    for axes in (left, right):
        axes.set_xticks(places, batches)
        axes.set_xlabel("sequences at once")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "goodput.png", dpi=150)


if __name__ == "__main__":
    main()
