"""`paceline audit`: what can be proved about what was generated."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.server.trail import TrailBroken
from paceline.server.trail import verify as verify_trail

audit = typer.Typer(rich_markup_mode="markdown", no_args_is_help=True)


@audit.callback()
def about() -> None:
    """What can be proved about what was generated."""


@audit.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The server's setting `audit_trail` names it.")],
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HASH", help="A head that was noted earlier: it must be in the chain.", show_default=False
        ),
    ] = None,
) -> None:
    """Prove that a trail of strict mode is as it was written.

    A line that was changed, removed, added or moved breaks the chain of hashes: the first such line is named and the status is
    1. An end that was cut off, or a file written anew, shows only against a --head that was kept elsewhere: from the last
    verification, from the server's log, or from GET /admin/trail.
    """
    try:
        found = verify_trail(file, head)
    except TrailBroken as error:
        console.fail(str(error))
        raise typer.Exit(1) from None
    console.out.print(f"{found.records} records, none changed; the head is {found.head}", soft_wrap=True)
    if found.unfinished:
        console.out.print(f"without an end, so running or cut short: {', '.join(found.unfinished)}", soft_wrap=True)
