"""Where a worker may get its weights, and how it gives them away: a part of what it is started from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.cluster_config import ClusterConfig
from paceline.runtime.wire.key_folder import PARTY_OF


@dataclass(frozen=True, slots=True)
class PeerAddress:
    name: str
    address: str = ""
    """Of its weight door; port 0 where it is only known once the peer runs."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    address: str
    """Of the worker's own weight door, to bind: tcp://host:port, port 0 for a free one."""
    peers: tuple[PeerAddress, ...] = ()
    """Other workers of the same model."""
    bytes_per_second: float = 0.0
    """That it gives away at the most; 0: no limit."""

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "WeightSpec":
        peers = tuple(PeerAddress(**peer) for peer in values["peers"])
        return WeightSpec(values["address"], peers, values["bytes_per_second"])


def weight_specs(config: ClusterConfig, addresses: Mapping[str, str]) -> dict[str, WeightSpec]:
    """By name, for the workers that have others of the same key and model beside them; `addresses` to bind, under
    `door_name`. A model that is divided over ranks is not given: each of them holds another share of it."""
    if not config.weights.from_peers:
        return {}
    alike: dict[tuple[str, ...], list[str]] = {}
    for pool in config.pools:
        if pool.tensor_parallel_size == 1:
            kind = (PARTY_OF[pool.role], pool.model, pool.dtype, pool.quantization)
            alike.setdefault(kind, []).extend(pool.worker_names)
    limit = config.weights.limit * 1e6
    return {
        name: WeightSpec(addresses[door_name(name)], _others(names, name, addresses), limit)
        for names in alike.values()
        if len(names) > 1
        for name in names
    }


def door_name(worker: str) -> str:
    return f"{worker}/weights"


def _others(names: Sequence[str], own: str, addresses: Mapping[str, str]) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(name, addresses[door_name(name)]) for name in names if name != own)
