from pathlib import Path

import pytest

from paceline.tools.bench.report import Report, measure
from paceline.tools.plots.plots import plot_report
from paceline.tools.prompts.prompts import AnswerTimes, Arrival

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("drafted", [0, 3])
def test_plot_with_and_without_drafts(tmp_path: Path, drafted: int) -> None:
    plain = [AnswerTimes(c, 0.0, (Arrival(0.1, 1), Arrival(0.2, 1)), "ab") for c in "xy"]
    fast = [
        AnswerTimes(c, 0.0, (Arrival(0.1, 1), *[Arrival(0.2, 1 + drafted, drafted, drafted)] * 6), "ab") for c in "xy"
    ]
    report = Report({"title": "test"}, (measure("plain", plain, 1.0, plain), measure("fast", fast, 1.0, plain)))
    plot_report(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
def test_too_few_drafts_are_said_in_the_plot(tmp_path: Path) -> None:
    plain = [AnswerTimes("x", 0.0, (Arrival(0.1, 1), Arrival(0.2, 1)), "ab")]
    fast = [AnswerTimes("x", 0.0, (Arrival(0.1, 1), Arrival(0.2, 2, 2, 1)), "ab")]
    report = Report({"title": "test"}, (measure("plain", plain, 1.0, plain), measure("fast", fast, 1.0, plain)))
    plot_report(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
