"""Builds a server from its configuration and runs it until it is told to stop."""

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.core.garbage import keep_loaded
from paceline.core.machine import usable_cores
from paceline.engine.llm import LLM
from paceline.models.loading.weights_sum import weights_sum
from paceline.server.auth.access import Access
from paceline.server.auth.audit_log import Trail
from paceline.server.auth.strict import StrictMode
from paceline.server.auth.tls import Tls
from paceline.server.config.config import ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.gateway.backend import Backend
from paceline.server.logs import configure_logging

if TYPE_CHECKING:
    from paceline.runtime.tracing.tracer import Tracing

logger = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds for responses to be written out after the engine is done with them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the server listens, and under what name the model is asked for."""

    url: str
    model: str
    needs_key: bool = False
    """Whether it answers holders of API keys alone."""


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
        from paceline.server.auth.cross_origin import parse_origins
        from paceline.server.draining_server import DrainingServer
        from paceline.server.gateway.gateway import Gateway
        from paceline.server.metrics.metrics import Metrics
    except ImportError as error:
        raise MissingDependency(error.name or "fastapi", "the server", "server") from error

    configure_logging(config.log_level, with_texts=config.log_requests == "text")
    open_backend = open_backend or (lambda: _open(config))
    # What is wrong with these is said before a model is loaded
    access, tls = Access.of(config, time.monotonic), Tls.of(config.tls_cert, config.tls_key)
    parse_origins(config.cors_origins)
    with (
        _listener(config.host, config.port) as listener,
        _tracing(config) as tracing,
        _strict(config) as strict,
        open_backend() as llm,
    ):
        if tracing is not None:
            llm.trace(tracing)
        metrics = Metrics(config.model_name)
        metrics.bind(llm.snapshot)
        metrics.bind_cluster(llm.cluster_status)
        flags = FlagStore(config.flags_file, llm.validate_flags)
        flags.subscribe(llm.set_flags)
        gateway = Gateway(llm, config, metrics, flags)
        settings = uvicorn.Config(
            create_app(gateway, access, strict, tracing),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=int(GRACE),
            server_header=False,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        url = _url(config.host, listener.getsockname()[1], tls is not None)
        ready = Ready(url, config.model_name, config.api_keys is not None)
        server = DrainingServer(settings, gateway, lambda: on_ready(ready))
        keep_loaded()
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
        advice = {
            errno.EADDRINUSE: "stop what is there, or choose another `port`",
            errno.EACCES: "choose a `port` from 1024 on",
        }.get(error.errno or 0, "`host` must be an address of this machine")
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from None
    return listener


@contextmanager
def _tracing(config: ServerConfig) -> Iterator["Tracing | None"]:
    if config.trace_endpoint is None:
        yield None
        return
    from paceline.runtime.tracing.tracer import Tracing

    with Tracing.to(config.trace_endpoint, f"{socket.gethostname()}:{os.getpid()}", config.trace_ratio) as tracing:
        yield tracing


@contextmanager
def _strict(config: ServerConfig) -> Iterator[StrictMode | None]:
    """The file is locked, and the weights read once, before the model is loaded."""
    if config.audit_trail is None:
        yield None
        return
    with Trail(config.audit_trail) as trail:
        strict = StrictMode(trail, config.model_name, weights_sum(config.engine.model), config.engine)
        logger.info("strict mode: the head of its trail is %s", trail.head)
        yield strict
        logger.info("strict mode: the head of its trail is %s", trail.head)


def _url(host: str, port: int, is_secure: bool) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def _open(config: ServerConfig) -> LLM:
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    llm = LLM(**asdict(config.engine))
    llm.rehearse()
    return llm
