from typing import Any

import pytest

from paceline.core.cluster_config import cluster_config
from paceline.core.errors import InvalidConfig
from paceline.deploy.deployment import process_specs
from paceline.wire.worker_spec import WorkerSpec


def specs(*pools: dict[str, Any], **settings: Any) -> dict[str, WorkerSpec]:
    made = process_specs(
        cluster_config({"pools": [{"role": "target", "model": "big", **pool} for pool in pools], **settings})
    )
    return {spec.name: spec for spec in made}


def peers(spec: WorkerSpec) -> list[str]:
    return [] if spec.weights is None else [peer.name for peer in spec.weights.peers]


def test_workers_of_one_model_are_peers() -> None:
    found = specs(
        {"name": "a", "replicas": 2},
        {"name": "b"},
        {"name": "other", "quantization": "int8"},
        {"name": "draft", "role": "draft"},
    )
    assert peers(found["a-0"]) == ["a-1", "b-0"]
    assert peers(found["b-0"]) == ["a-0", "a-1"]
    assert peers(found["other-0"]) == []  # no other worker holds this format; one that joins later loads from it
    assert peers(found["draft-0"]) == []  # another key
    addresses = {name: spec.weights.address for name, spec in found.items() if spec.weights is not None}
    assert len(set(addresses.values())) == 5
    known = {peer.address for spec in found.values() if spec.weights for peer in spec.weights.peers}
    assert known == {addresses[name] for name in ("a-0", "a-1", "b-0")}
    assert WorkerSpec.from_json(found["a-0"].to_json()) == found["a-0"]


def test_workers_with_other_numbers_of_ranks_are_peers() -> None:
    found = specs({"name": "a", "devices": ["cpu"]}, {"name": "b", "tensor_parallel_size": 2, "devices": ["cpu"]})
    assert found["b-0"].weights is not None
    assert [peer.name for peer in found["b-0"].weights.peers] == ["a-0"]


def test_serving_weights_can_be_disabled_and_limited() -> None:
    off = specs({"name": "a", "replicas": 2}, weights={"from_peers": False})
    assert off["a-0"].weights is None
    weights = specs({"name": "a", "replicas": 2}, weights={"limit": 12.5})["a-0"].weights
    assert weights is not None
    assert weights.bytes_per_second == 12.5e6
    with pytest.raises(InvalidConfig, match=r"weights.limit must be MB per second"):
        specs({"name": "a"}, weights={"limit": -1.0})
    with pytest.raises(InvalidConfig, match=r"did you mean 'weights.from_peers'"):
        specs({"name": "a"}, weights={"from_peer": True})
