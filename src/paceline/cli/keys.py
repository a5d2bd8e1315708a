"""`paceline keys`: who may talk to whom in a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console


def keys(folder: Annotated[Path, typer.Argument(help="Where to put them; `keys` in cluster.yaml names it.")]) -> None:
    """Make the keys of a cluster: a pair each for gateways, targets and drafts.

    Workers encrypt and let in nobody else. Each machine needs the secret keys of what runs there and all .pub files. Public
    keys of further clients go into the folder `allowed`.
    """
    from paceline.runtime.wire.key_folder import KeyFolder

    made = KeyFolder.make(folder)
    console.out.print(
        f"made keys for gateway, target and draft in {made.path}; in cluster.yaml:\n\nkeys: {made.path.resolve()}"
    )
