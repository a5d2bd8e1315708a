"""An audit's report as one HTML file: no script, nothing from elsewhere."""

import html
from collections.abc import Callable, Iterable

from paceline.audit.findings import MEANING
from paceline.audit.plots import plots
from paceline.audit.report import Report

SHOWN = 200
"""Findings listed; the rest is counted."""
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884 }
.clean, .drift { display: inline-block; padding: .1rem .6rem; border-radius: 1rem; color: #fff; background: #1a7f37 }
.drift { background: #cf222e }
figure { background: #fff; color: #000; margin: 1rem 0; padding: .5rem; border-radius: .5rem; overflow-x: auto }
figure svg { max-width: 100%; height: auto }
"""


def page(report: Report, words: Callable[[int], str]) -> str:
    """`words` says what a token id reads as."""
    verdict = "clean" if report.is_clean else "drift"
    about = "".join(_row([name, str(value)]) for name, value in report.about.items())
    checks = "".join(
        _row(
            [check.name, f"{check.num_checked:,} {check.unit}", f"{check.num_wrong:,}", check.detail],
            mark="drift" if check.num_wrong else "clean",
        )
        for check in report.checks
    )
    power = "".join(f"<li>{html.escape(line)}</li>" for line in report.power)
    pictures = "".join(f"<figure>{svg}</figure>" for svg in plots(report))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Audit: {verdict}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<h1>Audit <span class="{verdict}">{verdict}</span></h1>'
        f"<h2>What was audited</h2><table>{about}</table>"
        f"<h2>Checks</h2><table><tr><th>check</th><th>of</th><th>wrong</th><th></th><th></th></tr>{checks}</table>"
        f"{pictures}{_findings(report, words)}"
        f"<h2>What would have been found</h2><ul>{power}</ul></body></html>\n"
    )


def _findings(report: Report, words: Callable[[int], str]) -> str:
    if not report.findings:
        return ""

    def token(one: int | None) -> str:
        return "" if one is None or one < 0 else f"{one} {words(one)!r}"

    rows = "".join(
        _row(
            [
                str(finding.prompt),
                str(finding.index),
                finding.origin,
                MEANING[finding.kind],
                token(finding.token),
                token(finding.other),
                f"{finding.figure:.3g}",
            ]
        )
        for finding in report.findings[:SHOWN]
    )
    more = len(report.findings) - SHOWN
    rest = f"<p>And {more:,} more.</p>" if more > 0 else ""
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "token", "origin", "what", "was", "plain", "gap or KL"))
    return f"<h2>Findings</h2><table><tr>{head}</tr>{rows}</table>{rest}"


def _row(cells: Iterable[str], mark: str | None = None) -> str:
    shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    pill = "" if mark is None else f'<td><span class="{mark}">{mark}</span></td>'
    return f"<tr>{shown}{pill}</tr>"
