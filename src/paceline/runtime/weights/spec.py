"""The part of a worker's spec that says where it loads weights from and how it serves them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.cluster_config import ClusterConfig
from paceline.runtime.wire.keys import KEY_ROLE_OF


@dataclass(frozen=True, slots=True)
class PeerAddress:
    name: str
    address: str = ""
    """Address of its weight server. The port is 0 if it is known only once the peer runs."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    address: str
    """Address of the worker's own weight server to bind: tcp://host:port, port 0 for a free one."""
    peers: tuple[PeerAddress, ...] = ()
    """Other workers of the same model."""
    bytes_per_second: float = 0.0
    """Rate limit of the weight server. 0 means no limit."""

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "WeightSpec":
        peers = tuple(PeerAddress(**peer) for peer in values["peers"])
        return WeightSpec(values["address"], peers, values["bytes_per_second"])


def weight_specs(config: ClusterConfig, addresses: Mapping[str, str]) -> dict[str, WeightSpec]:
    """Specs by worker name. `addresses` has the addresses to bind under `weight_server_name`; workers without an address are
    absent. Workers with the same key and model are peers, whatever their number of ranks is."""
    if not config.weights.from_peers:
        return {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for pool in config.pools:
        if pool.engine == "paceline":
            group = (KEY_ROLE_OF[pool.role], pool.model, pool.dtype, pool.quantization, pool.activations)
            names = [name for name in pool.worker_names if weight_server_name(name) in addresses]
            groups.setdefault(group, []).extend(names)
    limit = config.weights.limit * 1e6
    return {
        name: WeightSpec(addresses[weight_server_name(name)], _peers(names, name, addresses), limit)
        for names in groups.values()
        for name in names
    }


def weight_server_name(worker: str) -> str:
    """Key of the worker's weight server in a mapping of addresses."""
    return f"{worker}/weights"


def _peers(names: Sequence[str], own: str, addresses: Mapping[str, str]) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(name, addresses[weight_server_name(name)]) for name in names if name != own)
