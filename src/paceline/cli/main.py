"""The entry point `paceline`. A missing package becomes an error with its install command."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def app() -> None:
    # For `kernels.gpu.products`, which otherwise chooses this library with a warning of torch
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    try:
        cli = _application(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"error: the command line needs the package `{error.name}`: pip install 'paceline[server]'")
    cli()


def _application(arguments: list[str]) -> "typer.Typer":
    """The application that these arguments need. To import all commands would delay the start of a server by half a second."""
    if arguments[:1] == ["serve"]:
        from paceline.cli.application import application
        from paceline.cli.serve import serve

        cli = application()
        cli.command()(serve)
        return cli
    from paceline.cli.commands import cli

    return cli
