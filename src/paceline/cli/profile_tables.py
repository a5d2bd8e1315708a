"""Profiles on the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from paceline.bench.profiling.profile import LABELS, Profile


def print_profiles(profiles: Sequence[Profile], console: Console) -> None:
    table = Table(title="Where a round's time goes, mean", title_justify="left")
    table.add_column("", no_wrap=True)
    for one in profiles:
        table.add_column(one.name, justify="right")
    for i, share in enumerate(profiles[0].parts):
        table.add_row(LABELS[share.part], *(_share(one.parts[i].seconds, one.parts[i].fraction) for one in profiles))
    table.add_section()
    table.add_row("round", *(f"{1000 * one.seconds:.2f} ms" for one in profiles))
    table.add_row("round, p50", *(f"{1000 * one.median_seconds:.2f} ms" for one in profiles))
    table.add_row("rounds", *(str(one.num_rounds) for one in profiles))
    table.add_section()
    table.add_row("read", *(f"{one.bytes_read / 1e6:.1f} MB" for one in profiles))
    table.add_row("bandwidth floor", *(_share(one.floor_seconds, one.floor_fraction) for one in profiles))
    console.print(table)
    console.print(
        f"Floor: a round's weights and cache, once through the memory at {profiles[0].bandwidth / 1e9:.1f} GB/s, a large copy.",
        style="dim",
        markup=False,
    )


def _share(seconds: float, fraction: float) -> str:
    return f"{1000 * seconds:.2f} ms {fraction:>6.1%}"
