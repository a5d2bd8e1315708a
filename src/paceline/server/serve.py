"""Builds a server from its configuration and runs it until a signal stops it."""

import errno
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.core.machine import freeze_loaded_objects
from paceline.core.speculation import SpeculationFlags
from paceline.models.loading.checksums import weights_checksum
from paceline.runtime.json_log import configure_logging
from paceline.server.auth.access import Access
from paceline.server.auth.audit_log import AuditLog
from paceline.server.auth.strict import StrictMode
from paceline.server.config.config import GatewayConfig, ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.learning.learner_process import learner_beside, learner_plan

if TYPE_CHECKING:
    from paceline.runtime.gateway_client.target_client import TargetClient
    from paceline.runtime.tracing import Tracing

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 2.0
"""Time to write out responses after their last token."""
IDLE_SECONDS = 75
"""Time after which an idle connection is closed. Clients and proxies keep theirs for up to a minute: a request that they send
while the server closes the connection would be lost."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The address and model name of a server that accepts requests."""

    url: str
    model: str
    needs_key: bool = False
    """Whether the API needs a key."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a certificate chain and its private key, checked to fit together."""

    certificate: str
    key: str | None
    """Private key file; None if `certificate` contains the key."""

    @classmethod
    def from_paths(cls, certificate: str | None, key: str | None) -> "TlsFiles | None":
        """None without a certificate. Raises `InvalidConfig` if the files are unreadable or do not fit together."""
        if certificate is None:
            if key is not None:
                raise InvalidConfig("tls_key needs tls_cert: set the certificate file too")
            return None
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_reject_password)
        except ssl.SSLError as error:
            raise InvalidConfig(
                f"tls_cert {certificate} and tls_key {key or certificate} are not a certificate and its key in PEM: "
                f"{error.reason or error}"
            ) from None
        except OSError as error:
            files = f"tls_cert {certificate}" + (f" or tls_key {key}" if key else "")
            raise InvalidConfig(f"cannot read {files}: {error.strerror}") from None
        return cls(certificate, key)


def log_ready(ready: Ready) -> None:
    logger.info("ready", extra={"address": ready.url, "model": ready.model})


def serve(
    served: ServerConfig | GatewayConfig,
    on_ready: Callable[[Ready], None] = log_ready,
) -> int:
    """Serves an engine process of its own, or a cluster. Calls `on_ready` when the server accepts requests. Returns the exit
    code: 0 if all requests finished, 1 if the server aborted some."""
    config = served.server if isinstance(served, GatewayConfig) else served
    configure_logging(config.log_level, with_texts=config.log_requests == "text")
    # Reports errors in these settings before the model is loaded
    admin_key = config.admin_key
    if config.learning.folder is not None and admin_key is None:
        admin_key = secrets.token_urlsafe(32)  # known to the learner only
    access = Access.from_config(replace(config, admin_key=admin_key), time.monotonic)
    tls = TlsFiles.from_paths(config.tls_cert, config.tls_key)
    plan = None if admin_key is None else _learner_plan(served, admin_key)
    with (
        _exit_on_sigterm(),
        _listen(config.host, config.port) as listener,
        _start_workers(served) as connections,
    ):
        # The workers load while this process imports and builds the gateway
        try:
            import uvicorn

            from paceline.server.app import create_app
            from paceline.server.auth.hosts import parse_hosts
            from paceline.server.auth.middleware import parse_origins
            from paceline.server.auth.rate_limit import RateLimits
            from paceline.server.connection_limits import ConnectionLimits
            from paceline.server.draining_server import DrainingServer
            from paceline.server.gateway.gateway import Gateway
            from paceline.server.gateway.models import ServedModels
            from paceline.server.http_protocol import LimitedProtocol
            from paceline.server.metrics.metrics import Metrics
        except ImportError as error:
            raise MissingDependency(error.name or "fastapi", "the server", "server") from error

        parse_origins(config.cors_origins)
        parse_hosts(config.allowed_hosts)
        limits = ConnectionLimits(config.max_connections, config.max_connections_per_address)
        with _open_tracing(config) as tracing, _open_audit_log(config) as log, ExitStack() as stack:
            url = _url(config.host, listener.getsockname()[1], tls is not None)
            learner = stack.enter_context(learner_beside(None if plan is None else plan | {"server": url}))
            strict = [_strict_mode(log, connection.config) for connection in connections]
            targets = [stack.enter_context(connection.connect()) for connection in connections]
            flags = FlagStore(config.flags_file, lambda flags: _validate_flags(targets, flags))
            rate_limits = RateLimits(time.monotonic, config.gateways)
            gateways = []
            for connection, target, strict_mode in zip(connections, targets, strict, strict=True):
                metrics = Metrics(connection.config.model_name)
                metrics.add_engine(target.engine_status)
                metrics.add_cluster(target.cluster_status)
                flags.subscribe(target.set_flags)
                reserved = access.reserved_shares
                gateways.append(Gateway(target, connection.config, metrics, flags, strict_mode, reserved, rate_limits))
            models = ServedModels(gateways)
            app = create_app(models, access, tracing)
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
            ready = Ready(url, ", ".join(gateway.model for gateway in models), config.api_keys is not None)

            def start() -> None:
                app.state.large_bodies.start()
                if learner is not None:
                    learner.start()
                on_ready(ready)

            server = DrainingServer(settings, models, start)
            freeze_loaded_objects()
            server.run([listener])
            return 0 if server.all_finished else 1


def _learner_plan(served: ServerConfig | GatewayConfig, key: str) -> dict[str, Any] | None:
    """The plan of the learner beside this server, without its URL; None: it has none. Raises `InvalidConfig`."""
    name = None
    if isinstance(served, GatewayConfig):
        config = served.models()[0][0]
        if len(served.cluster.models) > 1:
            name = config.model_name
    else:
        config = served
    if config.learning.folder is None:
        return None
    if config.tls_cert is not None:
        raise InvalidConfig(
            "learning.folder starts a learner that calls this server by its address, which its certificate does not name: set "
            "`learning: true` and start `paceline learn` with the server's name"
        )
    return learner_plan(config, "", key, name)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM while the workers load ends this process in order, so that they and their folder do not stay behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _listen(host: str, port: int) -> socket.socket:
    """Binds the port before the model is loaded, so that a port in use fails at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        advice = {
            errno.EADDRINUSE: "stop the other process, or set another `port`",
            errno.EACCES: "set a `port` of 1024 or more",
        }.get(error.errno or 0, "`host` must be an address of this machine")
        raise InvalidConfig(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from None
    return listener


@contextmanager
def _open_tracing(config: ServerConfig) -> Iterator["Tracing | None"]:
    if config.trace_endpoint is None:
        yield None
        return
    from paceline.runtime.tracing import Tracing

    with Tracing.to(config.trace_endpoint, f"{socket.gethostname()}:{os.getpid()}", config.trace_ratio) as tracing:
        yield tracing


@contextmanager
def _open_audit_log(config: ServerConfig) -> Iterator[AuditLog | None]:
    """Locks the audit log before the model is loaded."""
    if config.audit_trail is None:
        yield None
        return
    with AuditLog(config.audit_trail) as log:
        logger.info("head of the audit log: %s", log.head)
        yield log
        logger.info("head of the audit log: %s", log.head)


def _strict_mode(log: AuditLog | None, config: ServerConfig) -> StrictMode | None:
    """Hashes the weights of the model. None without an audit log."""
    if log is None:
        return None
    return StrictMode(log, config.model_name, weights_checksum(config.engine.model), config.engine)


def _validate_flags(targets: "Sequence[TargetClient]", flags: SpeculationFlags) -> None:
    """Raises `InvalidRequest` if a model cannot take the flags."""
    for target in targets:
        target.validate_flags(flags)


def _url(host: str, port: int, is_secure: bool) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


@dataclass(frozen=True, slots=True)
class ModelConnection:
    """The settings of one model, and a function that connects to its workers. It blocks until one is ready."""

    config: ServerConfig
    connect: "Callable[[], TargetClient]"


@contextmanager
def _start_workers(served: ServerConfig | GatewayConfig) -> Iterator[Sequence[ModelConnection]]:
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


def _reject_password() -> str:
    raise InvalidConfig("tls_key is encrypted: use a key without a password")
