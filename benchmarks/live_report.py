"""Tables and the plot of `live.py`."""

from pathlib import Path

from live_load import Results
from live_scenario import Scenario

from paceline.bench.plots import load_pyplot


def report(title: str, scenario: Scenario, results: Results, lost: list[str], seconds: float) -> None:
    tokens = sum(count for _, count in results.arrivals)
    print(f"\n{title}, {seconds:.0f} s\n")
    print("| streams | tokens | tokens/s | resumed | lost | different |\n|---|---|---|---|---|---|")
    print(
        f"| {results.finished} | {tokens} | {tokens / seconds:.0f} | {results.resumed} | {len(lost)} "
        f"| {len(results.different)} |\n"
    )
    print("| event | seconds |\n|---|---|")
    for label, began, ended in scenario.events:
        print(f"| `{label}` | {ended - began:.1f} |")
    for label, value in scenario.figures.items():
        print(f"| {label} | {value:.1f} |")
    for verdict in scenario.verdicts:
        print(f"| swap to {verdict.what}: {'kept' if verdict.is_kept else 'rolled back'} | {verdict.reason} |")
    for one in lost[:5]:
        print(f"LOST: {one}")


def plot(results: Results, scenario: Scenario, started: float, path: Path) -> None:
    """Tokens per second over time, with the events."""
    plt = load_pyplot()
    buckets: dict[int, int] = {}
    for when, count in results.arrivals:
        buckets[int(when - started)] = buckets.get(int(when - started), 0) + count
    seconds = range(max(buckets, default=0))
    figure, axes = plt.subplots(figsize=(10, 4))
    axes.plot(seconds, [buckets.get(second, 0) for second in seconds], linewidth=1)
    for i, (label, began, ended) in enumerate(event for event in scenario.events if event[1] >= started):
        axes.axvspan(began - started, max(ended, began + 0.3) - started, alpha=0.15, color=f"C{i % 9 + 1}")
        axes.text(began - started, axes.get_ylim()[1] * (0.97 - 0.06 * (i % 5)), label, fontsize=7, va="top")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
