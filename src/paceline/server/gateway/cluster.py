"""Serving with a cluster behind the gateway."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.core.errors import MissingDependency
from paceline.server.gateway.backend import Backend
from paceline.server.gateway.gateway_config import GatewayConfig
from paceline.server.serve import Ready, serve


def serve_cluster(config: GatewayConfig, on_ready: Callable[[Ready], None]) -> int:
    """`serve`, with workers that are up already, or that are started and stopped with the gateway."""
    try:
        from paceline.runtime.deploy.deployment import cluster, gateway_key
        from paceline.runtime.gateway_client.cluster_llm import ClusterLLM
    except ImportError as error:
        raise MissingDependency(error.name or "pyzmq", "a cluster", "pool") from error

    @contextmanager
    def open_backend() -> Iterator[Backend]:
        with (
            cluster(config.cluster) as directory,
            ClusterLLM(config.cluster, directory, gateway_key(config.cluster)) as llm,
        ):
            yield llm

    return serve(config.server, on_ready, open_backend)
