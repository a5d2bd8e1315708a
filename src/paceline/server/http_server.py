"""The HTTP side of a server: the gateway of every model, the application, and the uvicorn server that runs it.

`serve` imports this module while the workers load: the web framework takes a while.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from paceline.core.speculation import SpeculationFlags
from paceline.server.app import create_app
from paceline.server.auth.access import Access
from paceline.server.auth.hosts import parse_hosts
from paceline.server.auth.middleware import parse_origins
from paceline.server.auth.rate_limit import RateLimits
from paceline.server.auth.strict import StrictMode
from paceline.server.config.config import ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.connection_limits import ConnectionLimits
from paceline.server.draining_server import DrainingServer
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.models import ServedModels
from paceline.server.http_protocol import LimitedProtocol
from paceline.server.metrics.metrics import Metrics
from paceline.server.tls import TlsFiles

if TYPE_CHECKING:
    from paceline.runtime.gateway_client.target_client import TargetClient
    from paceline.runtime.tracing import Tracing

SHUTDOWN_SECONDS = 2.0
"""Time to write out responses after their last token."""
IDLE_SECONDS = 75
"""Time after which an idle connection is closed. Clients and proxies keep theirs for up to a minute: a request that they send
while the server closes the connection would be lost."""


def check_settings(config: ServerConfig) -> None:
    """Raises `InvalidConfig` for origins or hosts that cannot be read."""
    parse_origins(config.cors_origins)
    parse_hosts(config.allowed_hosts)


def make_models(
    config: ServerConfig,
    access: Access,
    configs: Sequence[ServerConfig],
    targets: "Sequence[TargetClient]",
    strict: Sequence[StrictMode | None],
) -> ServedModels:
    """One gateway per model. `configs`, `targets` and `strict` have one entry for each; `config` is that of the server."""
    flags = FlagStore(config.flags_file, lambda flags: _validate_flags(targets, flags))
    rate_limits = RateLimits(time.monotonic, config.gateways)
    gateways = []
    for own, target, strict_mode in zip(configs, targets, strict, strict=True):
        metrics = Metrics(own.model_name)
        metrics.add_engine(target.engine_status)
        metrics.add_cluster(target.cluster_status)
        flags.subscribe(target.set_flags)
        gateways.append(Gateway(target, own, metrics, flags, strict_mode, access.reserved_shares, rate_limits))
    return ServedModels(gateways)


def make_server(
    config: ServerConfig,
    models: ServedModels,
    access: Access,
    tls: TlsFiles | None,
    tracing: "Tracing | None",
    on_ready: Callable[[], None],
) -> DrainingServer:
    """The server of these models. It calls `on_ready` when it accepts requests."""
    app = create_app(models, access, tracing)
    limits = ConnectionLimits(config.max_connections, config.max_connections_per_address)
    settings = uvicorn.Config(
        app,
        http=partial(LimitedProtocol, limits=limits, client_timeout=config.client_timeout),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(SHUTDOWN_SECONDS),
        server_header=False,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )

    def start() -> None:
        app.state.large_bodies.start()
        on_ready()

    return DrainingServer(settings, models, start)


def _validate_flags(targets: "Sequence[TargetClient]", flags: SpeculationFlags) -> None:
    """Raises `InvalidRequest` if a model cannot take the flags."""
    for target in targets:
        target.validate_flags(flags)
