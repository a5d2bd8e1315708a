"""`paceline api-keys`: who may use a server, and how much of it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli import console
from paceline.server.auth.api_keys import SCOPES, ApiKey, KeyFile, KeyLimits

File = Annotated[
    Path,
    typer.Option(
        "--file", envvar="PACELINE_API_KEYS", metavar="FILE", help="The server's setting `api_keys` names it."
    ),
]
Name = Annotated[str, typer.Argument(help="Whose key it is; it stands in logs, histories and trails.")]
Limit = Annotated[int | None, typer.Option(min=1, show_default="no limit")]

api_keys = typer.Typer(rich_markup_mode="markdown", no_args_is_help=True)


@api_keys.command()
def add(
    name: Name,
    file: File = Path("keys.json"),
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"May be given more than once: {', '.join(SCOPES)}.", show_default="generate"),
    ] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    max_concurrent: Limit = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="No drafts for this key, and a record of all it generates.")
    ] = False,
) -> None:
    """Make a key and print it, once: the file holds only a hash of it.

    A running server knows it within a second. Without --scope it may generate, and nothing else.
    """
    limits = KeyLimits(requests_per_minute, tokens_per_minute, max_concurrent)
    text = KeyFile(file).add(name, scopes=tuple(dict.fromkeys(scope or ("generate",))), limits=limits, strict=strict)
    console.out.print(text, markup=False, soft_wrap=True)
    console.err.print(f"kept in {file} as a hash: this is the only time the key is shown", style="dim", soft_wrap=True)


@api_keys.command("list")
def list_keys(file: File = Path("keys.json")) -> None:
    """Show the keys there are, and those that were revoked."""
    table = Table("name", "scopes", "limits", "made", "revoked")
    for key in KeyFile(file).read():
        table.add_row(*_row(key), style="dim" if key.revoked else None)
    console.out.print(table)


@api_keys.command()
def revoke(name: Name, file: File = Path("keys.json")) -> None:
    """Take a key back. A running server refuses it within a second; what it is generating is finished."""
    KeyFile(file).revoke(name)
    console.out.print(f"{name} is revoked in {file}", markup=False, soft_wrap=True)


def _row(key: ApiKey) -> list[str]:
    limits = key.limits
    shown = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.max_concurrent, "at once"),
    )
    said = ", ".join(f"{limit} {unit}" for limit, unit in shown if limit is not None)
    scopes = " ".join((*key.scopes, "(strict)") if key.strict else key.scopes)
    return [key.name, scopes, said or "none", key.created[:10], (key.revoked or "")[:10]]
