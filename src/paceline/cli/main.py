"""The entry point `paceline`. A missing package becomes an error with its install command."""

import os
import sys
from difflib import get_close_matches


def app() -> None:
    # For `kernels.gpu.products`, which otherwise chooses this library with a warning of torch
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    try:
        from paceline.cli.application import COMMANDS, application
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"error: the command line needs the package `{error.name}`: pip install 'paceline[server]'")
    name = next((argument for argument in sys.argv[1:] if argument != "--debug"), "--help")
    if not name.startswith("-") and name not in COMMANDS:
        nearest = get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean `paceline {nearest[0]}`?" if nearest else "`paceline --help` lists the commands"
        sys.stderr.write(f"error: there is no command {name!r}: {advice}\n")
        sys.exit(2)
    needed = [name] if name in COMMANDS else [] if name == "--version" else list(COMMANDS)
    application(needed)()
