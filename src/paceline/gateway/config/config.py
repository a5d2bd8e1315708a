"""The settings of a server, and of a gateway in front of a cluster.

`LearningConfig` has the settings of `paceline learn`: what the gateway collects, and the learner that the server starts.
`SamplingDefaults` has the sampling parameters of requests that do not set them.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.core.cluster_config import ClusterConfig, trace_url
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, InvalidRequest
from paceline.core.request import SamplingParams
from paceline.gateway.config.settings import Setting, read_settings
from paceline.gateway.formats import ReasoningParserName, ToolParserName
from paceline.model_files import recommended_sampling
from paceline.model_files.hub import short_name


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """Section `learning` of the configuration. `learning: true` in a file is short for `learning: {enabled: true}`."""

    enabled: bool = False
    """Whether to collect token ids of finished streams in memory for `paceline learn`. With `api_keys`, only of keys created
    with `--learning`. See docs/learning.md."""
    max_samples: int = 4096
    """Streams in memory; the oldest ones leave first."""
    max_tokens: int = 1_000_000
    """Tokens of those streams in memory."""
    folder: str | None = None
    """Folder of the learned versions. If set, the server collects and starts a learner. If not, start
    `paceline learn` yourself."""
    draft: str | None = None
    """Draft that the learner starts with, a name or a folder. The default is the server's `draft`."""
    device: str = "cpu"
    """Device of the learner: cpu, cuda, or auto. It needs the target's weights there."""
    share: float = 0.25
    """Share of its time in which the learner computes; the rest is left to the server."""

    def __post_init__(self) -> None:
        if self.max_samples < 1 or self.max_tokens < 1:
            raise InvalidConfig("learning.max_samples and learning.max_tokens must be at least 1")
        if not 0.0 < self.share <= 1.0:
            raise InvalidConfig(f"learning.share must be over 0 and at most 1, got {self.share}")

    @property
    def is_collecting(self) -> bool:
        return self.enabled or self.folder is not None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters of requests that do not set them; see `SamplingParams`. If a parameter is None, the model's
    recommendation holds (`model_files/checksums.py`), or the model's distribution stays unchanged."""

    max_tokens: int | None = None
    """Output tokens. The default is the rest of the context window, and 16 for /v1/completions, as OpenAI does."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. The default is what the model's generation_config.json recommends,
    otherwise 1."""
    top_k: int | None = None
    """Candidates per token; 0 means no limit. The default is what the model recommends, otherwise 0."""
    top_p: float | None = None
    """Probability mass of the candidates; 1 means no limit. The default is what the model recommends, otherwise 1."""
    min_p: float | None = None
    """Least probability relative to the best candidate; 0 means no limit. The default is what the model recommends,
    otherwise 0."""
    repetition_penalty: float | None = None
    """Divisor of repeated tokens' logits; 1 means no penalty. The default is what the model recommends, otherwise 1."""
    presence_penalty: float = 0.0
    """Penalty of tokens that occurred; 0 means no penalty."""
    frequency_penalty: float = 0.0
    """Penalty of tokens per occurrence; 0 means no penalty."""

    def __post_init__(self) -> None:
        values = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            SamplingParams(**values)
        except InvalidRequest as error:
            raise InvalidConfig(f"sampling.{error}") from None

    def params(self, model: str, **given: Any) -> SamplingParams:
        """The given fields, then these, then those that `model` recommends. A given None counts as absent."""
        own = {name: value for name, value in asdict(self).items() if value is not None}
        present = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**(recommended_sampling(model) | own | present))


LogFormat = Literal["auto", "text", "json", "progress"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogDetail = Literal["none", "ids", "text"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of a server. In the file the keys of `engine` are at the top level."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    served_model_name: str | None = None
    """Name of the model in the API, or several, separated by commas; responses have the first. The default is the short name
    of `model`: that of the file, folder or repository. The value of `model` is then another name."""
    any_model_name: bool = False
    """Whether the only served model answers requests that name another one. Agents send fixed names."""
    max_waiting: int | None = None
    """Choices that may wait for a place in the batch; the server rejects further ones with 429. The default is a
    quarter of `max_num_seqs`, which keeps the wait short."""
    max_waiting_tokens: int | None = None
    """Prompt tokens that may wait; the server rejects further ones with 429. The default is half of the KV cache."""
    tool_parser: ToolParserName = "auto"
    """Format of tool calls in the model's answers. The default is what the chat template shows."""
    reasoning_parser: ReasoningParserName = "auto"
    """Format of reasoning in the model's answers. The default is what the chat template shows; `none` leaves it in the text."""
    request_timeout: float = 600.0
    """Time limit of a request in seconds, including the wait; a request may set a shorter one."""
    drain_timeout: float = 30.0
    """Seconds for running requests to finish after SIGTERM."""
    max_body_bytes: int = 4 * 2**20
    """Largest request body."""
    cpu_seconds_per_minute: float | None = 60.0
    """Processor time of the gateway for the requests of one key, or of one address if there are no keys: checks of bodies, chat
    templates, encoding and schemas. It is multiplied by the weight of the key. Further requests get 429."""
    gateway_memory_bytes: int | None = None
    """Memory of the gateway and its helpers, of which it refuses large bodies at 80%, new requests at 90%, and ends the most
    expensive ones at 95%. The default is a quarter of the memory of the machine or the container."""
    client_timeout: float = 30.0
    """Seconds that a client may take to send its headers, to send its body, and to read nothing of a response. Then the
    server closes the connection."""
    max_connections: int = 4096
    """Open connections in all; the server refuses further ones."""
    max_connections_per_address: int = 1024
    """Open connections of one IPv4 address, or of one IPv6 network of 64 bits. All clients of a proxy share its address."""
    trusted_proxies: str | None = None
    """Addresses or networks of proxies whose `X-Forwarded-For` names the client, separated by commas. The default is none:
    the address of a connection is that of the client. See docs/access.md."""
    allowed_hosts: str | None = None
    """Names of this server in the `Host` header, separated by commas, or `*`. The default is any name if `api_keys` is
    set, otherwise addresses and names that only a local network can define. See docs/access.md."""
    api_keys: str | None = None
    """Key file, created by `paceline api-keys`. Without it the API needs no key. See docs/access.md."""
    admin_key: str | None = field(default=None, repr=False)
    """Additional key with the scope `admin`. Without this and `api_keys` the server has no admin routes. Set it in the
    environment, not on the command line."""
    gateways: int = 1
    """Gateways that serve the same pools. Each enforces its share of the limits of an API key."""
    open_metrics: bool = False
    """Whether /metrics needs no key although `api_keys` is set."""
    cors_origins: str | None = None
    """Origins whose pages may call the API, separated by commas, or `*`. The default is only this server's own pages."""
    tls_cert: str | None = None
    """Certificate chain in PEM. Without it the server speaks plain HTTP."""
    tls_key: str | None = None
    """Private key in PEM. Without it `tls_cert` contains the key."""
    audit_trail: str | None = None
    """Audit log file for strict mode and flag changes. Without it the server has no strict mode."""
    audit_trail_text: bool = False
    """Whether the audit log contains prompts and outputs in addition to their hashes."""
    flags_file: str | None = None
    """File that stores run-time flags. Without it a restart resets them."""
    log_level: LogLevel = "info"
    """Level of the log on standard error."""
    log_format: LogFormat = "auto"
    """Form of the log. `auto`: `text`, lines for people with the phases of the start, if standard error is a terminal,
    otherwise `json`. `progress`: `json`, with a line for each advance of a start, for programs that show it."""
    log_requests: LogDetail = "ids"
    """Log line of every finished generation, at level `info`: `ids` has the key, token counts and times, `text` also has
    the prompt and the answer."""
    trace_endpoint: str | None = None
    """URL of the OTLP collector for OpenTelemetry spans, such as http://127.0.0.1:4318. Without it there is no
    tracing. See
    docs/tracing.md."""
    trace_ratio: float = 0.01
    """Share of requests without a `traceparent` header that are traced; the header decides for the others."""
    price: float | None = None
    """Dollars per hour of this server, for the cost of a million tokens in metrics and on the dashboard. A
    cluster has a price for each pool."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    learning: LearningConfig = field(default_factory=LearningConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        checks = (
            ("port", 0 <= self.port <= 65535, "in [0, 65535]"),
            ("max_waiting", self.max_waiting is None or self.max_waiting >= 0, "0 or more"),
            ("max_waiting_tokens", self.max_waiting_tokens is None or self.max_waiting_tokens >= 1, "at least 1"),
            ("request_timeout", self.request_timeout > 0, "over 0 seconds"),
            ("drain_timeout", self.drain_timeout >= 0, "0 seconds or more"),
            ("max_body_bytes", self.max_body_bytes >= 1024, "at least 1024"),
            (
                "cpu_seconds_per_minute",
                self.cpu_seconds_per_minute is None or self.cpu_seconds_per_minute > 0,
                "over 0",
            ),
            (
                "gateway_memory_bytes",
                self.gateway_memory_bytes is None or self.gateway_memory_bytes >= 1,
                "at least 1",
            ),
            ("client_timeout", self.client_timeout > 0, "over 0 seconds"),
            ("max_connections", self.max_connections >= 1, "at least 1"),
            ("max_connections_per_address", self.max_connections_per_address >= 1, "at least 1"),
            ("gateways", self.gateways >= 1, "at least 1"),
            (
                "tool_parser",
                self.tool_parser in get_args(ToolParserName),
                f"one of {', '.join(get_args(ToolParserName))}",
            ),
            (
                "reasoning_parser",
                self.reasoning_parser in get_args(ReasoningParserName),
                f"one of {', '.join(get_args(ReasoningParserName))}",
            ),
            ("log_level", self.log_level in get_args(LogLevel), f"one of {', '.join(get_args(LogLevel))}"),
            ("log_format", self.log_format in get_args(LogFormat), f"one of {', '.join(get_args(LogFormat))}"),
            ("log_requests", self.log_requests in get_args(LogDetail), f"one of {', '.join(get_args(LogDetail))}"),
            ("price", self.price is None or 0.0 <= self.price < float("inf"), "dollars per hour, 0 or more"),
            ("trace_ratio", 0.0 <= self.trace_ratio <= 1.0, "in [0, 1]"),
        )
        for name, good, allowed in checks:
            if not good:
                raise InvalidConfig(f"{name} must be {allowed}, got {getattr(self, name)!r}")
        if self.trace_endpoint is not None:
            trace_url(self.trace_endpoint)
        if self.admin_key is not None and len(self.admin_key) < 8:
            raise InvalidConfig("admin_key must have at least 8 characters")

    @property
    def logs_for_people(self) -> bool:
        """Whether the log of this process is text, for people."""
        return self.log_format == "text" or (self.log_format == "auto" and sys.stderr.isatty())

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that the model answers to. Responses have the first."""
        if self.served_model_name is not None:
            return tuple(name.strip() for name in self.served_model_name.split(","))
        return tuple(dict.fromkeys((short_name(self.engine.model), self.engine.model)))

    @property
    def model_name(self) -> str:
        return self.model_names[0]


SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in read_settings(ServerConfig, flat="engine")}
"""All settings by name, in the order of the documentation."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """A server in front of a cluster."""

    server: ServerConfig
    cluster: ClusterConfig

    def models(self) -> Sequence[tuple[ServerConfig, ClusterConfig]]:
        """The settings of every model's gateway, and the part of the cluster that serves the model."""
        engines = self.cluster.engines()
        short = Counter(map(short_name, self.cluster.models))
        kept = {pool.served_model_name for pool in self.cluster.pools}
        kept |= {model for model in self.cluster.models if short[short_name(model)] > 1}
        return [
            (
                replace(
                    self.server,
                    engine=engines[part.targets[0].worker_names[0]],
                    served_model_name=self.server.served_model_name or (model if model in kept else None),
                ),
                part,
            )
            for model in self.cluster.models
            for part in (self.cluster.for_model(model),)
        ]
