"""The entry point `paceline`. A missing package becomes an error with its install command."""

import sys


def app() -> None:
    try:
        from paceline.cli.commands import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"error: the command line needs the package `{error.name}`: pip install 'paceline[server]'")
    cli()
