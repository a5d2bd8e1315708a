"""Commands find their cluster: by a file, or the one that runs on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.commands import cli
from paceline.cli.workers import running_config
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig
from paceline.deploy.processes.state import DesiredFile, StateFolder
from paceline.policy.scaling.desired import DesiredState


@pytest.fixture(autouse=True)
def _empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@contextmanager
def up(name: str) -> Iterator[ClusterConfig]:
    """A state folder as a supervisor keeps it."""
    config = ClusterConfig((PoolConfig("target", "target", "m", replicas=2),), name=name)
    folder = StateFolder.of(config)
    folder.acquire()
    folder.write([])
    DesiredFile(folder.path).write(DesiredState.of(config))
    try:
        yield config
    finally:
        folder.release()


def write(path: Path, name: str) -> Path:
    path.write_text(yaml.safe_dump({"name": name, "pools": [{"name": "target", "role": "target", "model": "m"}]}))
    return path


def test_the_only_running_cluster_is_found_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with up("one") as config:
        assert running_config(None, None) == config
    assert "cluster one, found in" in capsys.readouterr().err


def test_without_a_cluster_the_error_says_what_to_pass() -> None:
    with pytest.raises(InvalidConfig, match=r"--config CLUSTER.yaml, or start one with `paceline up CLUSTER.yaml`"):
        running_config(None, None)


def test_of_several_clusters_none_is_chosen() -> None:
    with up("one"), up("two"), pytest.raises(InvalidConfig, match=r"2 clusters run here \(one, two\): give the file"):
        running_config(None, None)


def test_a_file_comes_before_running_clusters(tmp_path: Path) -> None:
    given = write(tmp_path / "given.yaml", "given")
    with up("one"):
        assert running_config(given, None).name == "given"
        write(tmp_path / "cluster.yaml", "here")
        assert running_config(None, None).name == "here"
        assert running_config(given, None).name == "given"


def test_ray_needs_a_file() -> None:
    with pytest.raises(InvalidConfig, match=r"--config CLUSTER\.yaml"):
        running_config(None, "auto")


def error_of(*words: str) -> str:
    result = CliRunner().invoke(cli, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("words", [("up",), ("down",), ("status",), ("apply",), ("scale", "target", "2")])
def test_the_default_of_every_command_is_the_file_in_this_folder(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("pools: []\n")
    assert "cluster.yaml: pools must be a list of at least one pool" in error_of(*words)


def test_without_a_file_up_and_apply_ask_for_one() -> None:
    for command in ("up", "apply"):
        assert "there is no cluster.yaml in this folder: give the file" in error_of(command)
    assert "or start one with `paceline up CLUSTER.yaml`" in error_of("down")


def test_status_without_a_cluster_asks_the_local_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.status.SERVER", "http://127.0.0.1:9")
    assert "no server answers at http://127.0.0.1:9" in error_of("status")
    monkeypatch.setattr("paceline.cli.status.HEARTBEAT_SECONDS", 0.0)
    with up("one"):
        result = CliRunner().invoke(cli, ["status"], env={"COLUMNS": "200"})
    assert result.exit_code == 1  # no worker is ready
    assert "cluster one, found in" in result.stderr
    assert "target-1" in result.stdout
