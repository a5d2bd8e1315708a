"""The report of a simulation as one HTML page."""

import base64
from collections.abc import Iterable, Sequence
from html import escape

from paceline.cli.render.advice import STYLE
from paceline.cli.render.simulation import describe, figures, milliseconds, title
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.objective import Objective
from paceline.planning.simulation.result import SimulationReport, SimulationResult

MAX_WORKERS = 64
"""Workers that the page lists."""


def page(report: SimulationReport, result: SimulationResult, objective: Objective, png: bytes) -> str:
    """One HTML file without external resources: latencies, figures, workers, the profile, and the plots."""
    config = result.config
    heading, picture = escape(title(report, config)), base64.b64encode(png).decode("ascii")
    times = [("TTFT", *milliseconds(report.ttft)), ("TPOT", *milliseconds(report.tpot))]
    shown = result.workers[:MAX_WORKERS]
    workers = [
        (
            worker.name,
            f"{worker.seconds:,.0f}",
            f"{worker.busy_seconds / worker.seconds:.1%}" if worker.seconds else "-",
        )
        for worker in shown
    ]
    rest = len(result.workers) - len(shown)
    parts = [
        f"<h1>{heading}</h1>",
        f"<p>Objective: {escape(describe(objective))}. Seed {config.seed}, {config.mode}, router {config.router}.</p>",
        f'<img alt="distributions of latency, utilisation of workers" src="data:image/png;base64,{picture}">',
        _table(("ms", "mean", "p50", "p90", "p99"), times),
        _table(("figure", ""), figures(report, objective)),
    ]
    if config.faults:
        parts += ["<h2>Faults</h2>", _table(("fault", "start, s", "end, s"), _faults(config))]
    parts += ["<h2>Workers</h2>", _table(("worker", "paid, s", "in steps"), workers)]
    if rest > 0:
        parts.append(f"<p>{rest} more workers are not listed.</p>")
    parts += [
        "<h2>Profile</h2>",
        f"<p>{escape(config.profile.about)}</p>",
        _table(("figure", "value", "origin"), _profile(config)),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{heading}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _faults(config: SimulationConfig) -> list[tuple[str, str, str]]:
    rows = []
    for fault in config.faults:
        what = f"{type(fault).__name__}: "
        what += ", ".join(getattr(fault, "workers", ())) or f"factor {getattr(fault, 'factor', 1.0):g}"
        end = "restart" if fault.end is None else "never" if fault.end == float("inf") else f"{fault.end:g}"
        rows.append((what, f"{fault.start:g}", end))
    return rows


def _profile(config: SimulationConfig) -> list[tuple[str, str, str]]:
    profile = config.profile
    named = (
        ("price per hour, $", profile.price_per_hour),
        ("draft price per hour, $", profile.draft_price_per_hour),
        ("KV cache, tokens", profile.kv_tokens),
        ("sequences at once", profile.max_num_seqs),
        ("start, s", profile.start_seconds),
    )
    return [(name, f"{figure.value:g}", figure.origin) for name, figure in named]
