"""`paceline export`: write a trained EAGLE head for other engines."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.render import console


def export(
    draft: Annotated[str, typer.Argument(help="EAGLE head of `paceline train`: a folder or a name.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output folder; must not exist.")],
    model: Annotated[str, typer.Option(help="Target of the head: a folder, a GGUF file or a name.")] = "smollm2",
    speculative_tokens: Annotated[int, typer.Option(min=1, help="Depth that the folder names as its default.")] = 3,
) -> None:
    """Write an EAGLE head in the format of `speculators`, which vLLM loads."""
    from paceline.train.speculators import export_head  # imports torch

    export_head(draft, model, out, speculative_tokens)
    console.out.print(f"{out} holds the head in the format of speculators.", soft_wrap=True)
