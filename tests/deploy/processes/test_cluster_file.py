"""Errors of `cluster.yaml` name the file once."""

from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.deploy.processes.cluster_file import load_cluster


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(None, id="missing"),
        pytest.param("pools: [", id="not YAML"),
        pytest.param("- a list", id="not a mapping"),
        pytest.param("pools: []", id="invalid"),
    ],
)
def test_an_error_names_the_file_once(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidConfig) as error:
        load_cluster(path)
    assert str(error.value).count(str(path)) == 1
