"""`pull`, `list`, `rm`, `ps` and `stop`, on a cache and on records in temporary folders."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import models
from paceline.cli.commands import cli
from paceline.cli.models import check_or_fetch
from paceline.core.config import EngineConfig
from paceline.core.errors import UnsupportedModel
from paceline.model_files.hub.hub import Repository

HOLD = """
import signal, sys, threading
from paceline.deploy.servers import recorded
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
with recorded("http://127.0.0.1:7", ["tiny"], [sys.argv[1]], False):
    print("here", flush=True)
    stop.wait()
"""


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, words, env={"COLUMNS": "200"})


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files of `owner/tiny` in the cache: two GGUF files."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    repository = Repository("owner/tiny")
    folder = repository.folder / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (repository.folder / "refs").mkdir()
    (repository.folder / "refs" / "main").write_text("0123")
    (repository.folder / "blobs").mkdir()
    for kind in ("Q4_K_M", "Q8_0"):
        blob = repository.folder / "blobs" / kind
        blob.write_bytes(bytes(2_000_000))
        (folder / f"tiny-{kind}.gguf").symlink_to(blob)
    return folder


@pytest.fixture
def server(snapshot: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is recorded as a server of the file with 4 bits."""
    command = [sys.executable, "-c", HOLD, str(snapshot / "tiny-Q4_K_M.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


def test_list_and_rm(snapshot: Path) -> None:
    listed = run("list").stdout
    assert "owner/tiny:Q4_K_M" in listed
    assert "2 MB" in listed
    assert "2 MB are free" in run("rm", "owner/tiny:Q4_K_M").stdout
    assert "owner/tiny:Q4_K_M" not in run("list").stdout
    assert run("rm", "owner/tiny:Q8_0").exit_code == 0
    assert not Repository("owner/tiny").folder.exists()
    assert "there is no model 'owner/tiny'" in run("rm", "owner/tiny").stderr
    assert "part of a package" in run("rm", "smollm2").stderr


def test_a_model_in_use_is_not_deleted(snapshot: Path, server: subprocess.Popen[bytes]) -> None:
    refused = run("rm", "owner/tiny:Q4_K_M")
    assert refused.exit_code == 2
    assert f"paceline stop {server.pid}" in refused.stderr
    assert (snapshot / "tiny-Q4_K_M.gguf").is_file()


def test_ps_and_stop(snapshot: Path, server: subprocess.Popen[bytes]) -> None:
    listed = run("ps").stdout
    assert str(server.pid) in listed
    assert "http://127.0.0.1:7" in listed
    assert "there are tiny" in run("stop", "other").stderr
    assert "Stopped tiny" in run("stop", "tiny").stdout
    assert server.wait() == 0
    assert "No server runs" in run("ps").stdout
    assert "`paceline ps` lists none" in run("stop").stderr


def test_a_model_that_is_not_here_is_downloaded_before_a_start(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[str] = []
    monkeypatch.setattr(models, "pull", lambda name, advance: pulled.append(name))
    for config in (EngineConfig("owner/other"), EngineConfig("nowhere"), EngineConfig("owner/tiny:Q8_0", draft="a/b")):
        with pytest.raises(UnsupportedModel):  # nothing was downloaded
            check_or_fetch(config)
    assert pulled == ["owner/other", "a/b"]
