"""`paceline learn`: a draft that learns from the traffic of a server."""

import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from paceline.cli.options import default_to
from paceline.cli.render import console
from paceline.cli.training.plan_options import add_plan
from paceline.cli.training.train import ProgressBar
from paceline.core.clock import WallClock
from paceline.learning.plan import LearnPlan
from paceline.learning.versions import Lineage, TrialResult, VersionFolder
from paceline.train.progress import PlainProgress, stop_on_interrupt

RUN = "run"
KEY = "PACELINE_ADMIN_KEY"
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the learned versions.")]

learn = typer.Typer(cls=default_to(RUN), rich_markup_mode="markdown", no_args_is_help=True)


@learn.callback()
def group() -> None:
    """Train a draft further on what a server generates, and offer it to the server.

    `paceline learn SERVER_URL --draft DRAFT --out FOLDER` runs until Ctrl-C. The server needs `learning: true`.
    """


@add_plan(LearnPlan, arguments=("server",))
def run(**options: Any) -> None:
    """Learn from a running server until Ctrl-C, SIGTERM or the end of --minutes.

    A version is kept if it is better on held-out samples, and then under load by measured goodput. The text never changes.
    """
    from paceline.learning.run import learn as learn_from

    plan = LearnPlan(**options)
    plan = replace(plan, key=plan.key or os.environ.get(KEY))
    clock = WallClock()
    shown = ProgressBar() if console.err.is_terminal else nullcontext(PlainProgress(clock))
    with shown as progress, stop_on_interrupt(progress.note) as stop:
        learn_from(plan, shlex.join(["paceline", *_without_key(sys.argv[1:])]), clock, progress, stop)
    console.out.print(_table(VersionFolder(plan.out).lineages()))


learn.command(RUN)(run)


@learn.command()
def status(folder: Folder) -> None:
    """Show what the learner does and all versions."""
    versions = VersionFolder(folder)
    state, activity = versions.state(), versions.activity()
    console.out.print(f"server: {state.server}", markup=False)
    console.out.print(f"draft: {versions.draft(versions.current())}", markup=False, soft_wrap=True)
    if state.is_paused:
        console.out.print("paused; `paceline learn resume` continues")
    if activity is not None:
        console.out.print(
            f"{activity.time}: {activity.doing}; {activity.samples} samples, {activity.new_tokens:,} new tokens of "
            f"{activity.tokens_wanted:,}",
            markup=False,
            soft_wrap=True,
        )
    console.out.print(_table(versions.lineages()))


@learn.command()
def pause(folder: Folder) -> None:
    """Stop reading samples and training. The server keeps its draft."""
    VersionFolder(folder).pause(True)
    console.out.print(f"{folder} is paused", markup=False, soft_wrap=True)


@learn.command()
def resume(folder: Folder) -> None:
    """Continue after `pause`."""
    VersionFolder(folder).pause(False)
    console.out.print(f"{folder} continues", markup=False, soft_wrap=True)


@learn.command()
def rollback(folder: Folder) -> None:
    """Refuse the current version and return to the one before it.

    The learner offers that one to the server, now or when it runs again, and trains from it.
    """
    versions = VersionFolder(folder)
    version, current = versions.roll_back()
    console.out.print(f"version {version} is refused; current: {versions.draft(current)}", markup=False, soft_wrap=True)


def _table(lineages: list[Lineage]) -> Table | str:
    if not lineages:
        return "no version yet"
    table = Table("version", "parent", "time", "samples", "alpha", "tokens per round", "status", "reason")
    for lineage in lineages:
        table.add_row(
            f"{lineage.version}",
            f"{lineage.parent}",
            lineage.time,
            f"{lineage.samples}",
            f"{lineage.alpha_before:.3f} -> {lineage.alpha_after:.3f}",
            f"{lineage.tokens_per_round_before:.2f} -> {lineage.tokens_per_round_after:.2f}",
            lineage.status,
            lineage.note or _reason(lineage.online) or _reason(lineage.offline),
        )
    return table


def _reason(verdict: TrialResult | None) -> str:
    return "" if verdict is None else verdict.reason


def _without_key(arguments: list[str]) -> list[str]:
    """The command without the API key: it is written into cards."""
    kept, is_key = list[str](), False
    for argument in arguments:
        if not is_key and argument != "--key" and not argument.startswith("--key="):
            kept.append(argument)
        is_key = argument == "--key"
    return kept
