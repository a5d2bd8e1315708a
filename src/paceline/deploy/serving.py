"""Builds a server from its configuration and runs it until a signal stops it.

`load_config` reads the configuration from a file, the environment and the command line; later ones take precedence.
`start_workers` connects the server to the workers of its models: an engine process of its own, or those of a cluster.
`LearnerProcess` is the learner of a server: a child process that is restarted if it fails, and that ends with the server.
"""

import errno
import json
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.child import ChildProcess, RestartedChild
from paceline.core.clock import Clock, WallClock
from paceline.core.config import EngineConfig, from_mapping
from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.core.machine import freeze_loaded_objects
from paceline.deploy.processes import is_cluster_file, load_cluster
from paceline.gateway.audit import AuditLog, StrictMode
from paceline.gateway.auth import Access
from paceline.gateway.config import (
    PREFIX,
    SETTINGS,
    GatewayConfig,
    LearningConfig,
    SamplingDefaults,
    ServerConfig,
    Setting,
    read_file,
    suggest,
)
from paceline.gateway.http import TlsFiles
from paceline.model_files import weights_checksum
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
def start_workers(served: ServerConfig | GatewayConfig) -> Iterator[Sequence[ModelConnection]]:
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
        with running_engine(served.engine, served.trace_endpoint, served.log_level) as process:
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
    """The address and model name of a server that accepts requests."""

    url: str
    model: str
    needs_key: bool = False
    """Whether the API needs a key."""


def log_ready(ready: ServerReady) -> None:
    logger.info("ready", extra={"address": ready.url, "model": ready.model})


def serve(
    served: ServerConfig | GatewayConfig,
    on_ready: Callable[[ServerReady], None] = log_ready,
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
        start_workers(served) as connections,
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
        ready = ServerReady(url, ", ".join(gateway.model for gateway in models), config.api_keys is not None)

        def start() -> None:
            if learner is not None:
                learner.start()
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
    """Hashes the weights of the model. None without an audit log."""
    if log is None:
        return None
    return StrictMode(log, config.model_name, weights_checksum(config.engine.model), config.engine)


def _url(host: str, port: int, is_secure: bool) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


OTHER_VARIABLES = frozenset({"PACELINE_CONFIG", "PACELINE_NATIVE"})
"""Variables with our prefix that are not settings: the path of the file, and the switch of the CPU kernels."""
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)|_PORT=\w+://")
"""Variables that Kubernetes sets in every pod for a service named `paceline`; they have our prefix."""


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    section: str | None = None,
) -> ServerConfig:
    """Reads the file at `path`, or only its `section`, then `environ`, then `overrides`.

    `overrides` are command line options: setting names, or option names with dots or dashes, and values as text or parsed.
    Raises `InvalidConfig` with the source of the bad value.
    """
    given: dict[str, tuple[Any, str]] = {} if path is None else read_file(path, SETTINGS, section)
    given |= _from_environment(environ or {})
    given |= _from_options(overrides or {})
    try:
        config = _build({name: value for name, (value, _) in given.items()})
        config.engine.speculation.check_method(config.engine.draft, has_pool=False)
        return config
    except InvalidConfig as error:
        raise InvalidConfig(f"{error}{_sources(str(error), given)}") from None


def load_gateway_config(
    path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> ServerConfig | GatewayConfig:
    """`GatewayConfig` if the file has `pools`, with the server's settings in its section `gateway`. Otherwise
    `ServerConfig`."""
    if path is None or not is_cluster_file(path):
        return load_config(path, environ, overrides)
    cluster = load_cluster(path)
    server = load_config(path, environ, overrides, section="gateway")
    if server.engine != EngineConfig():
        raise InvalidConfig(
            f"{path} has pools, which hold the settings of models and engines: remove those settings from `gateway`, the "
            "environment and the command line"
        )
    if server.price is not None:
        raise InvalidConfig(f"{path} has pools: set `price` of each pool, the dollars per hour of one worker")
    if server.served_model_name is not None and len(cluster.models) > 1:
        raise InvalidConfig(
            f"served_model_name names one model, and {path} has several: set `served_model_name` of its target pools instead"
        )
    target = cluster.engines()[f"{cluster.targets[0].name}-0"]
    endpoint = server.trace_endpoint or cluster.trace_endpoint
    return GatewayConfig(replace(server, engine=target, trace_endpoint=endpoint), cluster)


def _build(values: Mapping[str, Any]) -> ServerConfig:
    sections: dict[str, dict[str, Any]] = {"": {}, "speculation": {}, "sampling": {}, "learning": {}}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections[section][key] = value
    server_names = {setting for setting in SETTINGS if setting in ServerConfig.__dataclass_fields__}
    engine = {key: value for key, value in sections[""].items() if key not in server_names}
    server = {key: value for key, value in sections[""].items() if key in server_names}
    return from_mapping(
        ServerConfig,
        {
            **server,
            "sampling": from_mapping(SamplingDefaults, sections["sampling"], "sampling."),
            "learning": from_mapping(LearningConfig, sections["learning"], "learning."),
            "engine": from_mapping(EngineConfig, {**engine, "speculation": sections["speculation"]}),
        },
    )


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, tuple[Any, str]]]:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or SERVICE_LINK.search(f"{variable}={text}"):
            continue
        setting = by_variable.get(variable)
        if setting is None:
            raise InvalidConfig(f"unknown environment variable {variable!r}; {suggest(variable, by_variable)}")
        yield setting.name, (_parse(setting, text, variable), variable)


def _from_options(overrides: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
    by_identifier = {_identifier(name): setting for name, setting in SETTINGS.items()}
    for name, value in overrides.items():
        setting = by_identifier.get(_identifier(name))
        if setting is None:
            raise InvalidConfig(f"unknown option {name!r}; {suggest(name, SETTINGS)}")
        yield setting.name, (_parse(setting, value, setting.option), setting.option)


def _parse(setting: Setting, value: Any, source: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return setting.parse(value)
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} ({source})") from None


def _identifier(name: str) -> str:
    return name.removeprefix("--").replace(".", "_").replace("-", "_")


def _sources(message: str, given: Mapping[str, tuple[Any, str]]) -> str:
    """The sources of the settings that an error message names."""
    sources = [
        f"{name} comes from {source}"
        for name, (_, source) in given.items()
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message)
    ]
    return f" ({'; '.join(sources)})" if sources else ""
