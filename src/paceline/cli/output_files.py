"""Files that commands write: the option --json, a check of the folders, JSON, and a line about each file."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.render import console
from paceline.core.errors import InvalidRequest

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")]


def check_folders(*files: Path | None) -> None:
    """Raise `InvalidRequest` if the folder of a file does not exist. Commands call it before they measure."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise InvalidRequest(f"cannot write {file}: there is no folder {file.parent}", field="file")


def check_plots(*files: Path | None) -> None:
    """Raise `MissingDependency` if a file with a plot is wanted without matplotlib. Commands call it before they measure."""
    if any(file is not None for file in files):
        from paceline.bench.plots import load_pyplot

        load_pyplot()


def write_json(file: Path, figures: dict[str, Any]) -> None:
    file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")


def print_written(*files: Path | None) -> None:
    """Print a line about each written file. A file that was not requested is None."""
    for file in files:
        if file is not None:
            console.out.print(f"wrote {file}", markup=False, soft_wrap=True)
