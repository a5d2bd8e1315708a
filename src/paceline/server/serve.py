"""Builds a server from its configuration and runs it until it is told to stop."""

import logging
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.engine.llm import LLM
from paceline.server.backend import Backend
from paceline.server.config import ServerConfig
from paceline.server.flags import FlagStore
from paceline.server.logs import configure_logging

logger = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds for responses to be written out after the engine is done with them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the server listens, and under what name the model is asked for."""

    url: str
    model: str


def log_ready(ready: Ready) -> None:
    logger.info("ready", extra={"address": ready.url, "model": ready.model})


def serve(
    config: ServerConfig,
    on_ready: Callable[[Ready], None] = log_ready,
    open_backend: Callable[[], AbstractContextManager[Backend]] | None = None,
) -> int:
    """Serve the model that `open_backend` opens, by default the configured one in this process; `on_ready` is called once
    requests are accepted. Returns the process's exit code: 0 when everybody was served, 1 when requests had to be given up."""
    try:
        import uvicorn

        from paceline.server.app import create_app
        from paceline.server.draining_server import DrainingServer
        from paceline.server.gateway import Gateway
        from paceline.server.metrics import Metrics
    except ImportError as error:
        raise MissingDependency(error.name or "fastapi", "the server", "server") from error

    configure_logging(config.log_level)
    open_backend = open_backend or (lambda: LLM(**asdict(config.engine)))
    with _listener(config.host, config.port) as listener, open_backend() as llm:
        metrics = Metrics(config.model_name)
        metrics.bind(llm.snapshot)
        metrics.bind_cluster(llm.cluster_status)
        flags = FlagStore(config.flags_file, llm.validate_flags)
        flags.subscribe(llm.set_flags)
        gateway = Gateway(llm, config, metrics, flags)
        settings = uvicorn.Config(
            create_app(gateway),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=int(GRACE),
            server_header=False,
        )
        ready = Ready(_url(config.host, listener.getsockname()[1]), config.model_name)
        server = DrainingServer(settings, gateway, lambda: on_ready(ready))
        server.run([listener])
        return 0 if server.all_served else 1


def _listener(host: str, port: int) -> socket.socket:
    """Bound before the model is loaded: a port that is taken is no news to wait for."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidConfig(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what is there, or choose another `port`"
        ) from None
    return listener


def _url(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
