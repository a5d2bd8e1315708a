"""Advice on the terminal."""

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cluster.cost.advice import Advice
from paceline.cluster.cost.cost import Prospect


@dataclass(frozen=True, slots=True)
class Column:
    heading: str
    cell: Callable[[Prospect], str]


def columns(advice: Advice) -> list[Column]:
    """Those that have something to say."""
    found = [
        Column("method", lambda one: one.method),
        Column("depth", lambda one: str(one.depth)),
        Column("alpha", lambda one: f"{one.alpha:.2f}" if one.depth else "-"),
        Column("tokens\na round", lambda one: f"{one.tokens:.2f}"),
        Column("draft\nms", lambda one: _ms(one.draft_seconds)),
        Column("verify\nms", lambda one: _ms(one.verify_seconds)),
    ]
    if any(one.network_seconds for one in advice.table):
        found.append(Column("net\nms", lambda one: _ms(one.network_seconds)))
    found += [
        Column("speed", lambda one: f"{one.speedup:.2f}x"),
        Column("tokens\n/s", lambda one: f"{one.tokens_per_second:.1f}"),
    ]
    if any(one.memory_bytes for one in advice.table):
        found.append(Column("GB", lambda one: f"{one.memory_bytes / 1e9:.2f}" + ("" if one.fits else " !")))
    if any(one.dollars_per_million is not None for one in advice.table):
        found.append(Column("$ per\nmillion", lambda one: f"{one.dollars_per_million or 0.0:.2f}"))
    return found


def print_advice(advice: Advice, title: str, console: Console) -> None:
    console.print(title, style="bold", markup=False)
    shown = columns(advice)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0))
    for i, column in enumerate(shown):
        table.add_column(column.heading, justify="right" if i else "left", no_wrap=True)
    last = advice.table[0].method
    for one in advice.table:
        if one.method != last:
            table.add_section()
            last = one.method
        style = "bold green" if one == advice.choice else "dim" if one.speedup < 1.0 or not one.fits else ""
        table.add_row(*(column.cell(one) for column in shown), style=style)
    console.print(table)
    console.print()
    console.print(advice.verdict, style="bold green" if advice.speculate else "bold yellow", markup=False)
    for reason in advice.reasons:
        console.print(f"- {reason}", markup=False)
    for caution in advice.cautions:
        console.print(f"! {caution}", style="yellow", markup=False)


def _ms(seconds: float) -> str:
    return f"{1000.0 * seconds:.2f}" if seconds else "-"
