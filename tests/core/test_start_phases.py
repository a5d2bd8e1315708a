import json
import logging

import pytest

from paceline.core import machine
from paceline.core.machine import PhaseReport, phase, reporting_to, show_share


def test_a_phase_is_reported_and_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine, "REPORT_SECONDS", 0.0)
    seen: list[PhaseReport] = []
    with caplog.at_level(logging.INFO, "paceline"), reporting_to(seen.append):
        show_share(0.1)  # of no phase
        with phase("read weights") as reading:
            show_share(0.5)
            with phase("compile kernels"):
                show_share(0.25)
            reading.note = "1 GB"
    assert [(report.phase, report.done, report.note) for report in seen] == [
        ("read weights", None, ""),
        ("read weights", 0.5, ""),
        ("compile kernels", None, ""),
        ("compile kernels", 0.25, ""),
        ("compile kernels", None, ""),
        ("read weights", None, "1 GB"),
    ]
    assert [report.seconds is not None for report in seen] == [False, False, False, False, True, True]
    assert [record.message.split(" took ")[0] for record in caplog.records] == [
        "start: compile kernels",
        "start: read weights",
    ]


def test_shares_are_reported_now_and_then() -> None:
    seen: list[PhaseReport] = []
    with reporting_to(seen.append), phase("read weights"):
        for done in range(1000):
            show_share(done / 1000)
    assert len(seen) < 900


def test_a_phase_that_fails_is_not_logged_and_ends() -> None:
    seen: list[PhaseReport] = []
    with reporting_to(seen.append):
        with pytest.raises(ValueError, match="x"), phase("read weights"):
            raise ValueError("x")
        show_share(0.5)
    assert [report.seconds for report in seen] == [None]


def test_reports_are_lines_among_log_records() -> None:
    report = PhaseReport("read weights", done=0.5)
    assert PhaseReport.of_record(json.loads(report.to_json())) == report
    assert PhaseReport.of_record({"message": "loading"}) is None
    assert PhaseReport.of_record(None) is None
