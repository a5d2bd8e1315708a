"""Builds a server from its configuration and runs it until a signal stops it.

`start_workers` connects the server to the workers of its models: an engine process of its own, or those of a cluster.
`LearnerProcess` is the learner of a server: a child process that is restarted if it fails, and that ends with the server.
"""

import errno
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.child import ChildProcess, RestartedChild
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.core.machine import freeze_loaded_objects, raise_file_limit
from paceline.deploy.servers import recorded
from paceline.gateway.audit import AuditLog, StrictMode
from paceline.gateway.auth import Access
from paceline.gateway.config import (
    GatewayConfig,
    ServerConfig,
)
from paceline.gateway.http import TlsFiles
from paceline.model_files import context_length, weights_checksum
from paceline.model_files.hub import pick_draft
from paceline.policy.health import Backoff
from paceline.telemetry import configure_logging

if TYPE_CHECKING:
    from paceline.targets import TargetClient
    from paceline.telemetry import Tracing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelConnection:
    """The settings of one model, and a function that connects to its workers. It blocks until one is ready."""

    config: ServerConfig
    connect: "Callable[[], TargetClient]"


@contextmanager
def start_workers(
    served: ServerConfig | GatewayConfig, receive: Callable[[str], None] | None = None
) -> Iterator[Sequence[ModelConnection]]:
    """Starts the engine process of a server; the workers of a cluster may be up already. Yields one connection per model."""
    try:
        from paceline.deploy.deployment import gateway_key, open_cluster
        from paceline.deploy.engine_process import running_engine
        from paceline.targets import TargetClient
        from paceline.wire.worker_spec import ModelDirectory
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
        reports = receive is not None or served.log_format == "progress"
        with running_engine(served.engine, served.trace_endpoint, served.log_level, reports, receive) as process:
            yield [ModelConnection(served, partial(process.connect, served.price))]


COMMAND = (sys.executable, "-m", "paceline.tools.learn.run")
POLL = 0.5
GRACE = 10.0
"""Seconds that the learner has to end."""


def learner_plan(config: ServerConfig, url: str, key: str, served_model: str | None = None) -> dict[str, Any]:
    """The plan of the learner, see `tools/train/plan.py`. Raises `InvalidConfig` if there is no draft to train."""
    learning, engine = config.learning, config.engine
    draft = learning.draft or pick_draft(engine.draft, engine.model)
    if draft is None:
        raise InvalidConfig(
            "learning.folder needs a draft to train: set `draft` to a trained draft, or `learning.draft`. For a draft pool "
            "start `paceline learn URL --cluster CLUSTER.yaml --pool NAME` yourself"
        )
    return {
        "server": url,
        "draft": draft,
        "out": learning.folder,
        "model": engine.model,
        "served_model": served_model,
        "key": key,
        "device": learning.device,
        "share": learning.share,
    }


class LearnerProcess:
    """Starts the child on its own thread, and restarts it after a growing pause."""

    def __init__(
        self, plan: dict[str, Any], command: Sequence[str] = COMMAND, clock: Clock | None = None, poll: float = POLL
    ) -> None:
        self._line = json.dumps(plan).encode() + b"\n"
        self._poll = poll
        self._child = RestartedChild(lambda: ChildProcess(command), Backoff().delay, clock or WallClock())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-learner")

    @property
    def num_starts(self) -> int:
        return self._child.num_starts

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the child. It leaves its folder consistent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._child.start().send(self._line)
            while (ended := self._child.poll()) is None and not self._stop.wait(self._poll):
                pass
            if ended is None or self._stop.is_set():
                self._child.stop(GRACE)
                return
            logger.warning("the learner ended with status %s and starts again in %.0f s", ended.exit_code, ended.pause)
            self._stop.wait(ended.pause)


@contextmanager
def open_learner(plan: dict[str, Any] | None) -> Iterator[LearnerProcess | None]:
    """Yields the learner, which ends with the block; `start` starts it. Yields None without a plan."""
    if plan is None:
        yield None
        return
    learner = LearnerProcess(plan)
    try:
        yield learner
    finally:
        learner.close()


@dataclass(frozen=True, slots=True)
class ServerReady:
    """A server that accepts requests."""

    url: str
    model: str
    """Name of the model. Several are separated by commas."""
    needs_key: bool = False
    """Whether the API needs a key."""
    has_template: bool = True
    """Whether the model has a chat template."""
    window: int | None = None
    """Tokens of a sequence at most. None if there are several models."""
    own_window: int | None = None
    """Tokens for which the model was made. None if its files do not say."""


def log_ready(ready: ServerReady) -> None:
    logger.info("ready", extra={"address": ready.url, "model": ready.model})


def serve(
    served: ServerConfig | GatewayConfig,
    on_ready: Callable[[ServerReady], None] = log_ready,
    receive: Callable[[str], None] | None = None,
) -> int:
    """Serves an engine process of its own, or a cluster. Calls `on_ready` when the server accepts requests. `receive` gets the
    lines of the engine process: its log as JSON, and reports of its phases. Without it they go to standard error. Returns
    the exit code: 0 if all requests finished, 1 if the server aborted some."""
    config = served.server if isinstance(served, GatewayConfig) else served
    configure_logging(config.log_level, with_texts=config.log_requests == "text", for_people=config.logs_for_people)
    raise_file_limit()
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
        start_workers(served, receive) as connections,
    ):
        return _run(config, access, tls, plan, listener, connections, on_ready)


def _run(
    config: ServerConfig,
    access: Access,
    tls: TlsFiles | None,
    plan: dict[str, Any] | None,
    listener: socket.socket,
    connections: Sequence[ModelConnection],
    on_ready: Callable[[ServerReady], None],
) -> int:
    """Builds the gateway while the workers load, and runs it. Returns the exit code of `serve`."""
    try:
        from paceline.gateway.http import check_settings, make_models, make_server
    except ImportError as error:
        raise MissingDependency(error.name or "fastapi", "the server", "server") from error
    check_settings(config)
    with _open_tracing(config) as tracing, _open_audit_log(config) as log, ExitStack() as stack:
        url = _url(config.host, listener.getsockname()[1], tls is not None)
        learner = stack.enter_context(open_learner(None if plan is None else plan | {"server": url}))
        configs = [connection.config for connection in connections]
        strict = [_strict_mode(log, own) for own in configs]
        targets = [stack.enter_context(connection.connect()) for connection in connections]
        models = make_models(config, access, configs, targets, strict)
        only = models.first.target if len(models) == 1 else None
        ready = ServerReady(
            url,
            ", ".join(gateway.model for gateway in models),
            config.api_keys is not None,
            all(gateway.tokenizer.chat_template is not None for gateway in models),
            None if only is None else only.max_model_len,
            None if only is None else context_length(configs[0].engine.model),
        )

        names = [name for own in configs for name in own.model_names]
        paths = [os.path.abspath(own.engine.model) for own in configs if os.path.exists(own.engine.model)]

        def start() -> None:
            if learner is not None:
                learner.start()
            stack.enter_context(recorded(url, names, paths, ready.needs_key))
            on_ready(ready)

        server = make_server(config, models, access, tls, tracing, start)
        freeze_loaded_objects()
        server.run([listener])
        return 0 if server.all_finished else 1


def _learner_plan(served: ServerConfig | GatewayConfig, key: str) -> dict[str, Any] | None:
    """The plan of this server's learner, without the server's URL. None if the server starts no learner. Raises
    `InvalidConfig`."""
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
    from paceline.telemetry import Tracing

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
    """Hashes the weights of the model. It is None without an audit log."""
    if log is None:
        return None
    return StrictMode(log, config.model_name, weights_checksum(config.engine.model), config.engine)


def _url(host: str, port: int, is_secure: bool) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
