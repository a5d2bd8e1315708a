"""Advice as one HTML file that needs nothing else."""

import base64
from html import escape

from paceline.cli.advise_tables import columns
from paceline.cluster.cost.advice import Advice

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
    shown = columns(advice)
    rows, last = [], advice.table[0].method
    for one in advice.table:
        marks = ["first"] if one.method != last else []
        marks += ["choice"] if one == advice.choice else ["loss"] if one.speedup < 1.0 or not one.fits else []
        cells = "".join(f"<td>{escape(column.cell(one))}</td>" for column in shown)
        rows.append(f'<tr class="{" ".join(marks)}">{cells}</tr>')
        last = one.method
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
