"""Commands on live pools find their cluster: by a file, or the one that runs on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from paceline.cli.live.running import running_config
from paceline.cluster.scaling.desired import DesiredState
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig
from paceline.runtime.deploy.state import DesiredFile, StateFolder


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
