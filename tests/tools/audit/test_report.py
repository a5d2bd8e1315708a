"""The report of an audit as HTML and JSON."""

import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from paceline.tools.audit.html_report import SHOWN, page
from paceline.tools.audit.report import AuditedText, Finding, Report

RANKS = tuple((i + 0.5) / 40 for i in range(40))


def text(prompt: int, *findings: Finding, **more: Any) -> AuditedText:
    return AuditedText(prompt, ("plain", "accepted", "recovered"), 4, 2, findings, **more)


def coupled(*findings: Finding) -> Report:
    seen: dict[str, Any] = {"p_divergence": ((0, 0.0), (2, 1e-9)), "most_divergence": 1e-8}
    texts = [text(0, *findings, margins=(0.5, 1e-6, 0.0), **seen), text(1, margins=(1.0,) * 3)]
    return Report({"model": "<tiny>"}, texts, True)


def rejection(*findings: Finding, ranks: tuple[float, ...] = RANKS) -> Report:
    figures: dict[str, Any] = {
        "p_divergence": ((0, 0.0), (1, 1e-15), (2, 0.0)),
        "q_divergence": ((1, 0.0),),
        "num_samples": 1,
    }
    figures |= {"ranks": ranks, "plain_ranks": RANKS, "most_divergence": 1e-8}
    return Report({"model": "tiny"}, [text(0, *findings, **figures), text(1, **figures)], False)


TOKEN = Finding("token", 0, 1, "accepted", 5, 9, 0.25)
P = Finding("p", 0, 1, "accepted", 5, None, float("inf"))


@pytest.mark.parametrize("report", [coupled(), rejection()])
def test_clean(report: Report) -> None:
    assert report.is_clean
    assert (report.num_drafted, report.num_accepted) == (8, 4)
    assert all(check.num_checked for check in report.checks)


@pytest.mark.parametrize("report", [coupled(TOKEN), rejection(P), rejection(ranks=(0.1,) * 40)])
def test_drift(report: Report) -> None:
    assert not report.is_clean
    assert sum(check.num_wrong for check in report.checks) == 1


@pytest.mark.parametrize("report", [coupled(TOKEN), rejection()])
def test_page_has_no_external_resources(report: Report) -> None:
    found = page(report, lambda token: "<b>&")
    assert ("Audit: clean" in found, "Findings" in found) == (report.is_clean, not report.is_clean)
    assert "<script" not in found
    assert "<b>" not in found
    assert "<tiny>" not in found
    pictures = found.split("<figure>")[1:]
    assert len(pictures) == 2
    for picture in pictures:
        ET.fromstring(picture.split("</figure>")[0])


def test_finding_row_has_both_tokens_and_the_gap() -> None:
    found = page(coupled(*[TOKEN] * (SHOWN + 3)), lambda token: f"word{token}")
    row = next(row for row in found.split("<tr>") if "word5" in row)
    for cell in ("accepted", "5 &#x27;word5&#x27;", "9 &#x27;word9&#x27;", "0.25"):
        assert f"<td>{cell}</td>" in row
    assert "And 3 more" in found


def test_power_is_stated() -> None:
    """A fault in a share s of the texts is missed with probability (1 - s)^N."""
    report = Report({}, [text(i) for i in range(200)], True)
    assert "2.3% of the texts" in report.power[0]
    assert len(report.power) == 2
    assert "once in 1000 audits" in rejection().power[2]


def test_rounds_without_a_log_are_not_plotted() -> None:
    """Steps of the graph executor are not logged; only the text is checked."""
    report = Report({}, [text(0, margins=(1.0,) * 3)], True)
    assert (report.is_clean, report.checks[2].num_checked) == (True, 0)
    assert page(report, str).count("<figure>") == 1


def test_json() -> None:
    found = rejection(P).to_json()
    assert (found["clean"], found["drafted"], len(found["checks"])) == (False, 8, 4)
    assert (found["findings"][0]["kind"], found["findings"][0]["figure"]) == ("p", None)
    json.dumps(found, allow_nan=False)
