"""The HTTP side of a server: the gateway of every model, the application, and the uvicorn server that runs it.

`serve` imports this module while the workers load: the web framework takes a while.

`DrainingServer` drains before it stops. The first SIGTERM or Ctrl-C starts to drain: /ready returns 503, new requests are
rejected, and running requests get `drain_timeout` seconds. A second signal aborts them.

`TlsFiles` are the files of a TLS certificate and its key.
"""

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from paceline.core.errors import InvalidConfig
from paceline.core.request import SpeculationFlags
from paceline.gateway.audit import StrictMode
from paceline.gateway.auth import Access, ConnectionLimits, RateLimits
from paceline.gateway.bodies import CpuBudgets
from paceline.gateway.config import FlagStore, ServerConfig
from paceline.gateway.http.app import create_app
from paceline.gateway.http.middleware import parse_hosts, parse_origins, parse_proxies
from paceline.gateway.http.protocol import LimitedProtocol
from paceline.gateway.metrics import Metrics
from paceline.gateway.sessions import Gateway, ServedModels

if TYPE_CHECKING:
    from paceline.targets import TargetClient
    from paceline.telemetry import Tracing

logger = logging.getLogger(__name__)


REPORT_SECONDS = 2.0
"""Time between two lines about the requests that a stopping server waits for."""


class DrainingServer(uvicorn.Server):
    """Calls `on_ready` when it accepts requests. `all_finished` is False if it aborted requests."""

    def __init__(self, settings: uvicorn.Config, models: ServedModels, on_ready: Callable[[], None]) -> None:
        super().__init__(settings)
        self.all_finished = True
        self._models, self._on_ready = models, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's handler, which stops listening at once and raises the signal again at the end."""
        if self._loop is None:
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig))

    def _stop(self, number: signal.Signals) -> None:
        assert self._loop is not None
        waiting, reason = _num_requests(self._models.num_requests), {"reason": number.name}
        key = "Ctrl-C" if number == signal.SIGINT else number.name
        if self._drain_task is None:
            seconds = self._models.first.config.drain_timeout
            text = f"stopping: waiting up to {seconds:g} s for {waiting}; a second {key} aborts them"
            logger.info(text if self._models.num_requests else "stopping", extra=reason)
            self._drain_task = self._loop.create_task(self._drain_and_exit())
        else:
            logger.warning("stopping: %s aborted", waiting, extra=reason)
            self.all_finished = False
            self._models.abort()

    async def _drain_and_exit(self) -> None:
        draining = asyncio.create_task(self._models.drain())
        while not (await asyncio.wait({draining}, timeout=REPORT_SECONDS))[0]:
            logger.info("waiting for %s", _num_requests(self._models.num_requests))
        self.all_finished = draining.result() and self.all_finished
        self.should_exit = True


def _num_requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


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


def _reject_password() -> str:
    raise InvalidConfig("tls_key is encrypted: use a key without a password")


SHUTDOWN_SECONDS = 2.0
"""Time to write out responses after their last token."""
IDLE_SECONDS = 75
"""Time after which an idle connection is closed. Clients and proxies keep theirs for up to a minute: a request that they send
while the server closes the connection would be lost."""


def check_settings(config: ServerConfig) -> None:
    """Raises `InvalidConfig` for origins, hosts or proxies that cannot be read."""
    parse_origins(config.cors_origins)
    parse_hosts(config.allowed_hosts)
    parse_proxies(config.trusted_proxies)


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
    cpu = CpuBudgets(config.cpu_seconds_per_minute, time.monotonic)
    gateways = []
    for own, target, strict_mode in zip(configs, targets, strict, strict=True):
        metrics = Metrics(own.model_name)
        metrics.add_engine(target.engine_status)
        metrics.add_cluster(target.cluster_status)
        flags.subscribe(target.set_flags)
        gateways.append(Gateway(target, own, metrics, flags, strict_mode, access.reserved_shares, rate_limits, cpu))
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
        http=partial(  # type: ignore[arg-type]
            LimitedProtocol,
            limits=limits,
            client_timeout=config.client_timeout,
            record=models.first.metrics.record_rejection,
        ),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=int(SHUTDOWN_SECONDS),
        server_header=False,
        proxy_headers=bool(proxies := parse_proxies(config.trusted_proxies)),
        forwarded_allow_ips=proxies,
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
