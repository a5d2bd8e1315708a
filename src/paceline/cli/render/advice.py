"""Advice as a terminal table and as an HTML page."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cluster.cost.advice import Advice
from paceline.cluster.cost.cost import Estimate


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    cell: Callable[[Estimate], str]


def columns(advice: Advice) -> list[Column]:
    """The columns that have a value in some row."""
    found = [
        Column("method", lambda row: row.method),
        Column("depth", lambda row: str(row.depth)),
        Column("alpha", lambda row: f"{row.alpha:.2f}" if row.depth else "-"),
        Column("tokens\n/round", lambda row: f"{row.tokens:.2f}"),
        Column("draft\nms", lambda row: _ms(row.draft_seconds)),
        Column("verify\nms", lambda row: _ms(row.verify_seconds)),
    ]
    if any(row.network_seconds for row in advice.table):
        found.append(Column("net\nms", lambda row: _ms(row.network_seconds)))
    found += [
        Column("speed", lambda row: f"{row.speedup:.2f}x"),
        Column("tokens\n/s", lambda row: f"{row.tokens_per_second:.1f}"),
    ]
    if any(row.memory_bytes for row in advice.table):
        found.append(Column("GB", lambda row: f"{row.memory_bytes / 1e9:.2f}" + ("" if row.fits else " !")))
    if any(row.dollars_per_million is not None for row in advice.table):
        found.append(Column("$ per\nmillion", lambda row: f"{row.dollars_per_million or 0.0:.2f}"))
    return found


def print_advice(advice: Advice, title: str, console: Console) -> None:
    console.print(title, style="bold", markup=False)
    shown = columns(advice)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0))
    for i, column in enumerate(shown):
        table.add_column(column.heading, justify="right" if i else "left", no_wrap=True)
    last = advice.table[0].method
    for row in advice.table:
        if row.method != last:
            table.add_section()
            last = row.method
        style = "bold green" if row == advice.choice else "dim" if row.speedup < 1.0 or not row.fits else ""
        table.add_row(*(column.cell(row) for column in shown), style=style)
    console.print(table)
    console.print()
    console.print(advice.verdict, style="bold green" if advice.speculate else "bold yellow", markup=False)
    for reason in advice.reasons:
        console.print(f"- {reason}", markup=False)
    for caution in advice.cautions:
        console.print(f"! {caution}", style="yellow", markup=False)


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:.2f}" if seconds else "-"


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.4rem; } img { max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; } th { border-bottom: 2px solid #57606a; }
th:first-child, td:first-child { text-align: left; }
tr.first td { border-top: 1px solid #d0d7de; }
tr.choice { background: #dafbe1; font-weight: 600; } tr.loss { color: #8c959f; }
.caution { color: #9a6700; }
"""


def page(advice: Advice, title: str, png: bytes) -> str:
    """One HTML file without external resources."""
    shown = columns(advice)
    rows, last = [], advice.table[0].method
    for row in advice.table:
        marks = ["first"] if row.method != last else []
        marks += ["choice"] if row == advice.choice else ["loss"] if row.speedup < 1.0 or not row.fits else []
        cells = "".join(f"<td>{escape(column.cell(row))}</td>" for column in shown)
        rows.append(f'<tr class="{" ".join(marks)}">{cells}</tr>')
        last = row.method
    headings = "".join(f"<th>{escape(column.heading)}</th>" for column in shown)
    notes = [f"<li>{escape(reason)}</li>" for reason in advice.reasons]
    notes += [f'<li class="caution">{escape(str(caution))}</li>' for caution in advice.cautions]
    picture = base64.b64encode(png).decode("ascii")
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{escape(advice.verdict)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{escape(advice.verdict)}</h1>\n<p>{escape(title)}</p>\n"
        f'<ul>\n{chr(10).join(notes)}\n</ul>\n<img alt="speed and tokens by depth" src="data:image/png;base64,{picture}">\n'
        f"<table>\n<thead><tr>{headings}</tr></thead>\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>\n</body>\n</html>\n"
    )
