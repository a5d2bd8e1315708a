"""One round of each arrangement of target and draft, from the timestamps that pools_gpu.py saves.

    python benchmarks/pools_gpu_timeline.py FOLDER/timelines.json --out rounds.png

A row for the target (schedule, wait for drafts or draft, verify, commit) and, with a draft worker, one for its passes, on one
clock.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from pools_gpu_draft import PassTime

from paceline.bench.plots import load_pyplot
from paceline.engine.executors.executor import StepResult
from paceline.engine.hooks.hook import StepHook

SHOWN_ROUNDS = 3
COLOURS = {
    "schedule": "#9aa5b1",
    "wait for drafts": "#d9822b",
    "draft": "#2da44e",
    "verify": "#1f6feb",
    "commit": "#6e40c9",
}


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """One step; seconds on the machine's clock. Drafts of a graph step ran on the device, between `scheduled` and `drafted`."""

    began: float
    scheduled: float
    drafted: float
    verified: float
    ended: float
    is_graph: bool

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class RoundRecorder(StepHook):
    """Times of the decode steps since `clear`, and the seconds of their verifications."""

    def __init__(self, now: Any) -> None:
        self.rounds: list[RoundTimes] = []
        self.verify_seconds: list[float] = []
        self._now, self._began = now, 0.0
        self._result: StepResult | None = None

    def clear(self) -> None:
        self.rounds.clear()
        self.verify_seconds.clear()

    def before_step(self) -> None:
        self._began, self._result = self._now(), None

    def committed(self, result: StepResult) -> None:
        if all(one.verdict is not None and one.num_tokens == 1 for one in result.sequences):
            self._result = result
            self.verify_seconds.append(result.verify_seconds)

    def after_step(self) -> None:
        if (result := self._result) is not None:
            times, ended = result.times, self._now()
            began = times.began if result.is_graph else self._began
            self.rounds.append(RoundTimes(began, times.began, times.drafted, times.verified, ended, result.is_graph))


def timeline(rounds: Sequence[RoundTimes], passes: Iterable[PassTime]) -> dict[str, object]:
    """Typical rounds of one text in a row, as JSON: the first one is closest to the median time, and the passes beside them."""
    typical = median(one.seconds for one in rounds)

    def distance(first: int) -> float:
        pauses = [later.began - one.ended for one, later in pairwise(rounds[first : first + SHOWN_ROUNDS])]
        return abs(rounds[first].seconds - typical) + sum(max(0.0, pause) for pause in pauses)

    first = min(range(max(1, len(rounds) - SHOWN_ROUNDS)), key=distance)
    shown = rounds[first : first + SHOWN_ROUNDS]
    began, ended = shown[0].began, shown[-1].ended
    beside = [one for one in passes if one.ended > began and one.began < ended]
    return {
        "rounds": [asdict(one) for one in shown],
        "passes": [one._asdict() for one in beside],
        "median_seconds": typical,
    }


def draw(timelines: dict[str, dict[str, Any]], path: Path) -> None:
    pyplot = load_pyplot()
    rows = [2 if one["passes"] else 1 for one in timelines.values()]
    figure, every = pyplot.subplots(
        len(rows), 1, figsize=(11, 1.2 + 0.3 * len(rows) + 0.35 * sum(rows)), height_ratios=[0.6 + row for row in rows],
        sharex=True, layout="constrained", squeeze=False,
    )  # fmt: skip
    for axes, (name, one) in zip(every[:, 0], timelines.items(), strict=True):
        start = one["rounds"][0]["began"]
        drafting = "wait for drafts" if one["passes"] else "draft"
        for round_ in one["rounds"]:
            parts = ("schedule", drafting, "verify", "commit")
            points = [round_[key] for key in ("began", "scheduled", "drafted", "verified", "ended")]
            for part, left, right in zip(parts, points[:-1], points[1:], strict=True):
                _bar(axes, 1, left - start, right - start, part)
        for pass_ in one["passes"]:
            _bar(axes, 0, pass_["began"] - start, pass_["ended"] - start, "draft")
        if one["passes"]:
            axes.set_yticks([0, 1], ["draft worker", "target"], fontsize=8)
        else:
            axes.set_yticks([1], ["target"], fontsize=8)
        axes.set_ylim(-0.5 if one["passes"] else 0.5, 1.5)
        axes.set_title(f"{name}: {1e3 * one['median_seconds']:.1f} ms a round (median)", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    longest = max(one["rounds"][-1]["ended"] - one["rounds"][0]["began"] for one in timelines.values())
    every[-1, 0].set(xlabel="milliseconds", xlim=(0.0, 1e3 * longest))
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[part]) for part in COLOURS]
    figure.legend(handles, COLOURS, loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bar(axes: Any, row: int, left: float, right: float, part: str) -> None:
    axes.broken_barh(
        [(1e3 * left, 1e3 * (right - left))], (row - 0.35, 0.7), facecolors=COLOURS[part], edgecolor="white"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timelines", type=Path)
    parser.add_argument("--out", type=Path, default=Path("rounds.png"))
    options = parser.parse_args()
    draw(json.loads(options.timelines.read_text()), options.out)


if __name__ == "__main__":
    main()
