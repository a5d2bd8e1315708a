"""Configuration of a server: defaults, then a file, then the environment, then the command line; the last one wins."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.core.config import EngineConfig, from_mapping
from paceline.core.errors import InvalidConfig, InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.core.trace_endpoint import trace_url
from paceline.server.config.config_file import read_file
from paceline.server.config.settings import PREFIX, Setting, nearest, settings_of
from paceline.server.request_log import Detail

LogLevel = Literal["debug", "info", "warning", "error"]

OTHER_VARIABLES = frozenset({"PACELINE_CONFIG", "PACELINE_NATIVE"})
"""Variables of ours that are no settings: the file's own path, and the switch of the CPU kernels."""
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP)|_PORT=\w+://")
"""Kubernetes describes a service called `paceline` to every pod in variables that start like ours."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say; see `SamplingParams`."""

    max_tokens: int | None = None
    """Output tokens; None: as many as the model's window has left, and 16 for /v1/completions, as OpenAI has it."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    """1: off."""
    min_p: float = 0.0
    """0: off."""
    repetition_penalty: float = 1.0
    """1: off."""
    presence_penalty: float = 0.0
    """0: off."""
    frequency_penalty: float = 0.0
    """0: off."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            SamplingParams(**given)
        except InvalidRequest as error:
            raise InvalidConfig(f"sampling.{error}") from None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything a server is built from. `engine` has no section of its own in the file: its keys stand beside these."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    served_model_name: str | None = None
    """What clients call the model; None: the value of `model`."""
    max_waiting: int | None = None
    """Requests that may wait for a seat; further ones are answered with 429. None: a quarter of the seats, so that
    whoever is let in waits little longer than on an empty server."""
    request_timeout: float = 600.0
    """Seconds a request may take, waiting included; a request may ask for less."""
    drain_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    max_body_bytes: int = 8 * 2**20
    """Largest request body that is read."""
    api_keys: str | None = None
    """File of API keys, made by `paceline api-keys`; None: the API is open to whoever can reach it. See docs/access.md."""
    admin_key: str | None = field(default=None, repr=False)
    """One more key with the scope `admin`; with neither this nor `api_keys` there are no admin routes. Better in the
    environment than on the command line."""
    open_metrics: bool = False
    """Whether /metrics asks for no key where `api_keys` are configured."""
    cors_origins: str | None = None
    """Origins whose pages may call the API, separated by commas, or `*`; None: only pages of this server itself."""
    tls_cert: str | None = None
    """Certificate chain in PEM; None: plain HTTP."""
    tls_key: str | None = None
    """Its private key; None: in the same file."""
    audit_trail: str | None = None
    """File that records what is generated in strict mode, and changes of flags; None: there is no strict mode."""
    audit_trail_text: bool = False
    """Whether that file holds the prompts and outputs themselves, beside their hashes."""
    flags_file: str | None = None
    """Where run-time flags are kept; None: a restart forgets them."""
    log_level: LogLevel = "info"
    """How much is logged, as JSON lines on standard error."""
    log_requests: Detail = "ids"
    """Whether every generation has a line at level `info` when it is over: `ids` has who, how much and how long, `text` also
    the prompt and the answer."""
    trace_endpoint: str | None = None
    """Where OpenTelemetry spans are sent, an OTLP collector's URL such as http://127.0.0.1:4318; None: there are none. See
    docs/tracing.md."""
    trace_ratio: float = 0.01
    """Share of the requests without a `traceparent` that are traced; one that has it decides itself."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        checks = (
            ("port", 0 <= self.port <= 65535, "in [0, 65535]"),
            ("max_waiting", self.max_waiting is None or self.max_waiting >= 0, "0 or more"),
            ("request_timeout", self.request_timeout > 0, "over 0 seconds"),
            ("drain_timeout", self.drain_timeout >= 0, "0 seconds or more"),
            ("max_body_bytes", self.max_body_bytes >= 1024, "at least 1024"),
            ("log_level", self.log_level in get_args(LogLevel), f"one of {', '.join(get_args(LogLevel))}"),
            ("log_requests", self.log_requests in get_args(Detail), f"one of {', '.join(get_args(Detail))}"),
            ("trace_ratio", 0.0 <= self.trace_ratio <= 1.0, "in [0, 1]"),
        )
        for name, good, allowed in checks:
            if not good:
                raise InvalidConfig(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        if self.trace_endpoint is not None:
            trace_url(self.trace_endpoint)
        if self.admin_key is not None and len(self.admin_key) < 8:
            raise InvalidConfig("admin_key must have at least 8 characters: it guards the server")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.engine.model


SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in settings_of(ServerConfig, flat="engine")}
"""By name, in the order of the documentation."""


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    section: str | None = None,
) -> ServerConfig:
    """`section` names the part of the file that is meant; None: all of it. `overrides` are the command line's: setting names,
    or those with dots and dashes for underscores, and values, parsed or not. Raises `InvalidConfig` that says where a bad
    value came from."""
    said: dict[str, tuple[Any, str]] = {} if path is None else read_file(path, SETTINGS, section)
    said |= _from_environment(environ or {})
    said |= _from_options(overrides or {})
    try:
        return _build({name: value for name, (value, _) in said.items()})
    except InvalidConfig as error:
        raise InvalidConfig(f"{error}{_origins(str(error), said)}") from None


def _build(values: Mapping[str, Any]) -> ServerConfig:
    sections: dict[str, dict[str, Any]] = {"": {}, "speculation": {}, "sampling": {}}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        sections[section][key] = value
    own = {setting for setting in SETTINGS if setting in ServerConfig.__dataclass_fields__}
    engine = {key: value for key, value in sections[""].items() if key not in own}
    server = {key: value for key, value in sections[""].items() if key in own}
    return from_mapping(
        ServerConfig,
        {
            **server,
            "sampling": from_mapping(SamplingDefaults, sections["sampling"], "sampling."),
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
            raise InvalidConfig(f"unknown environment variable {variable!r}; {nearest(variable, by_variable)}")
        yield setting.name, (_parsed(setting, text, variable), variable)


def _from_options(overrides: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, str]]]:
    by_identifier = {_identifier(name): setting for name, setting in SETTINGS.items()}
    for name, value in overrides.items():
        setting = by_identifier.get(_identifier(name))
        if setting is None:
            raise InvalidConfig(f"unknown option {name!r}; {nearest(name, SETTINGS)}")
        yield setting.name, (_parsed(setting, value, setting.option), setting.option)


def _parsed(setting: Setting, value: Any, origin: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return setting.parse(value)
    except InvalidConfig as error:
        raise InvalidConfig(f"{error} ({origin})") from None


def _identifier(name: str) -> str:
    return name.removeprefix("--").replace(".", "_").replace("-", "_")


def _origins(message: str, said: Mapping[str, tuple[Any, str]]) -> str:
    """Where the settings that an error names were given."""
    found = [
        f"{name} comes from {origin}"
        for name, (_, origin) in said.items()
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", message)
    ]
    return f" ({'; '.join(found)})" if found else ""
