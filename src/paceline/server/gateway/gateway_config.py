"""What `serve` is to serve: one engine, or a gateway in front of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core.cluster_config import ClusterConfig
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig
from paceline.runtime.deploy.cluster_file import is_cluster_file, load_cluster
from paceline.server.config.config import ServerConfig, load_config


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    server: ServerConfig
    cluster: ClusterConfig


def load_served(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> ServerConfig | GatewayConfig:
    """A file that names pools is a cluster's; its section `gateway` holds the server's settings."""
    if path is None or not is_cluster_file(path):
        return load_config(path, environ, overrides)
    cluster = load_cluster(path)
    server = load_config(path, environ, overrides, section="gateway")
    if server.engine != EngineConfig():
        raise InvalidConfig(
            f"{path} names pools, and the settings of models and engines belong to them: leave them out of `gateway`, the "
            "environment and the command line"
        )
    target = cluster.engines()[f"{cluster.targets[0].name}-0"]
    endpoint = server.trace_endpoint or cluster.trace_endpoint
    return GatewayConfig(replace(server, engine=target, trace_endpoint=endpoint), cluster)
