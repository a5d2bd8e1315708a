"""Commands that start workers check the cluster first, and change nothing if it has a problem."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml
from typer.testing import CliRunner

from paceline.cli.commands import cli
from paceline.cli.workers import UNSOUND, check_before_start
from paceline.core.errors import PacelineError
from paceline.deploy.processes.cluster_file import load_cluster
from paceline.deploy.processes.state import DesiredFile, StateFolder
from paceline.policy.scaling.desired import DesiredState


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    """A cluster whose model does not exist."""
    target = {"name": "target", "role": "target", "model": str(tmp_path / "absent"), "devices": ["cpu"]}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"state_dir": str(tmp_path / "state"), "pools": [target]}))
    return path


@pytest.fixture
def running(cluster_file: Path) -> Iterator[StateFolder]:
    """The state folder of a cluster with one worker less than the file says, as a supervisor keeps it."""
    config = load_cluster(cluster_file)
    folder = StateFolder.of(config)
    folder.acquire()
    folder.write([])
    DesiredFile(folder.path).write(DesiredState.of(config))
    document = yaml.safe_load(cluster_file.read_text())
    document["pools"][0]["replicas"] = 2
    cluster_file.write_text(yaml.safe_dump(document))
    yield folder
    folder.release()


def refused(*words: str) -> None:
    result = CliRunner().invoke(cli, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    assert "this cluster cannot start; target: " in result.stderr
    assert "absent" in result.stderr


def test_serve_starts_no_worker_of_a_cluster_with_a_problem(
    cluster_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("paceline.deploy.serving.serve", lambda config, on_ready: served.append(config) or 0)
    refused("serve", "--config", str(cluster_file))
    assert served == []


def test_a_gateway_of_running_workers_is_not_checked(
    cluster_file: Path, running: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("paceline.deploy.serving.serve", lambda config, on_ready: served.append(config) or 0)
    assert CliRunner().invoke(cli, ["serve", "--config", str(cluster_file)]).exit_code == 0
    assert len(served) == 1


@pytest.mark.parametrize("words", [("apply", "--yes"), ("scale", "target", "2"), ("rollout",)])
def test_a_running_cluster_stays_as_it_is(
    words: tuple[str, ...], cluster_file: Path, running: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cluster_file.parent)
    problem = b"this cluster cannot start; target: absent"
    ended = subprocess.CompletedProcess([], UNSOUND, stdout=problem)
    monkeypatch.setattr("paceline.cli.workers.subprocess.run", lambda *_, **__: ended)
    before = running.desired()
    refused(*words)
    assert running.desired() == before


def test_a_check_that_breaks_is_an_error(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(PacelineError, match=r"ended with status 1: run `paceline doctor`"):
        check_before_start(load_cluster(cluster_file))


REFUSED = """
import runpy, sys
sys.argv = ["paceline", "serve", "--port", "0", *sys.argv[1:]]
try:
    runpy.run_module("paceline", run_name="__main__")
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/nowhere"], "no model at"),
        (["--draft", "/nowhere"], "no draft at"),
        (["--draft", "FOLDER"], "ids differ"),
    ],
)
def test_serve_refuses_what_files_show_before_it_imports_torch(tmp_path: Path, options: list[str], words: str) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    given = [str(tmp_path) if option == "FOLDER" else option for option in options]
    done = subprocess.run([sys.executable, "-c", REFUSED, *given], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"], done.stdout + done.stderr
    assert words in done.stderr
