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


TYPOS = """
heath: {canary: 1}
weights: {from_peer: false}
gateway: {prt: 1, sampling: {temprature: 0}}
pools:
  - {name: target, role: target, model: smollm2, replica: 2, limits: {max_seqs: 3}}
  - {name: draft, role: draft, modell: smollm2}
"""


def test_all_unknown_keys_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TYPOS)
    with pytest.raises(InvalidConfig) as error:
        load_cluster(path)
    assert [line.removeprefix(f"{path}: unknown key ") for line in str(error.value).splitlines()] == [
        "'heath'; did you mean 'health'?",
        "'weights.from_peer'; did you mean 'weights.from_peers'?",
        "'pools[0].replica'; did you mean 'pools[0].replicas'?",
        "'pools[0].limits.max_seqs'; did you mean 'pools[0].limits.max_num_seqs'?",
        "'pools[1].modell'; did you mean 'pools[1].model'?",
        "'gateway.prt'; did you mean 'gateway.port'?",
        "'gateway.sampling.temprature'; did you mean 'gateway.sampling.temperature'?",
    ]
