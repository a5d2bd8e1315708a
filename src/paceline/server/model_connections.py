"""The connections of a server to the workers of its models: an engine process of its own, or those of a cluster."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.errors import MissingDependency
from paceline.server.config.config import GatewayConfig, ServerConfig

if TYPE_CHECKING:
    from paceline.runtime.gateway_client.target_client import TargetClient


@dataclass(frozen=True, slots=True)
class ModelConnection:
    """The settings of one model, and a function that connects to its workers. It blocks until one is ready."""

    config: ServerConfig
    connect: "Callable[[], TargetClient]"


@contextmanager
def start_workers(served: ServerConfig | GatewayConfig) -> Iterator[Sequence[ModelConnection]]:
    """Starts the engine process of a server; the workers of a cluster may be up already. Yields one connection per model."""
    try:
        from paceline.runtime.deploy.deployment import gateway_key, open_cluster
        from paceline.runtime.deploy.directory import ModelDirectory
        from paceline.runtime.deploy.engine_process import running_engine
        from paceline.runtime.gateway_client.target_client import TargetClient
    except ImportError as error:
        raise MissingDependency(error.name or "pyzmq", "the server", "server") from error
    if isinstance(served, GatewayConfig):
        key = gateway_key(served.cluster)
        with open_cluster(served.cluster) as directory:
            yield [
                ModelConnection(
                    config,
                    partial(
                        TargetClient,
                        cluster,
                        ModelDirectory(directory, cluster.models[0]),
                        key,
                        engine=config.engine,
                        is_shared=len(served.cluster.models) > 1,
                    ),
                )
                for config, cluster in served.models()
            ]
    else:
        with running_engine(served.engine, served.trace_endpoint, served.log_level) as process:
            yield [ModelConnection(served, partial(process.connect, served.price))]
