"""`paceline api-keys`: the API keys of a server, with scopes and limits."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from paceline.cli import console
from paceline.gateway.auth import SCOPES, ApiKey, KeyFile, KeyLimits, KeyShare

File = Annotated[
    Path,
    typer.Option(
        "--file", envvar="PACELINE_API_KEYS", metavar="FILE", help="Key file; the server's setting `api_keys`."
    ),
]
Name = Annotated[str, typer.Argument(help="Name of the key in logs, request histories and audit logs.")]
Limit = Annotated[int | None, typer.Option(min=1, show_default="no limit")]

api_keys = typer.Typer(
    rich_markup_mode="markdown", no_args_is_help=True, help="Manage the API keys of a server: scopes and rate limits."
)


@api_keys.command()
def add(
    name: Name,
    file: File = Path("keys.json"),
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(SCOPES)}; may be repeated.", show_default="generate"),
    ] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    max_concurrent: Limit = None,
    weight: Annotated[float, typer.Option(help="Weight in the queue of a full server.")] = 1.0,
    reserved: Annotated[float, typer.Option(help="Share of the server that other keys may not use, 0 to 0.9.")] = 0.0,
    priority: Annotated[int, typer.Option(help="Lowest priority number that its requests may have.")] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="No drafts for this key, and an audit log of all it generates.")
    ] = False,
    learning: Annotated[
        bool, typer.Option("--learning", help="Token ids of its streams may train drafts that all keys use.")
    ] = False,
) -> None:
    """Create a key and print it once. The file stores only its hash.

    A running server accepts the key within a second. Without --scope the key can only generate.
    """
    limits = KeyLimits(requests_per_minute, tokens_per_minute, max_concurrent)
    share = KeyShare(weight, reserved, priority)
    scopes = tuple(dict.fromkeys(scope or ("generate",)))
    text = KeyFile(file).add(name, scopes=scopes, limits=limits, share=share, strict=strict, learning=learning)
    console.out.print(text, markup=False, soft_wrap=True)
    console.err.print(f"stored in {file} as a hash; the key is not shown again", style="dim", soft_wrap=True)


@api_keys.command("list")
def list_keys(file: File = Path("keys.json")) -> None:
    """List all keys, revoked ones included."""
    table = Table("name", "scopes", "limits", "created", "revoked")
    for key in KeyFile(file).read():
        table.add_row(*_row(key), style="dim" if key.revoked else None)
    console.out.print(table)


@api_keys.command()
def revoke(name: Name, file: File = Path("keys.json")) -> None:
    """Revoke a key. A running server rejects it within a second; running requests finish."""
    KeyFile(file).revoke(name)
    console.out.print(f"{name} is revoked in {file}", markup=False, soft_wrap=True)


def _row(key: ApiKey) -> list[str]:
    limits = key.limits
    shown = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.max_concurrent, "concurrent"),
    )
    text = ", ".join(f"{limit} {unit}" for limit, unit in shown if limit is not None)
    marks = [f"({name})" for name in ("strict", "learning") if getattr(key, name)]
    scopes = " ".join((*key.scopes, *marks))
    return [key.name, scopes, text or "none", key.created[:10], (key.revoked or "")[:10]]
