"""`cluster.yaml`: pools, the number of their workers, and where they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from paceline.core.config import EngineConfig, from_mapping, unknown_keys
from paceline.core.errors import InvalidConfig, UnknownKeys
from paceline.core.machine import device_shares
from paceline.core.pool_config import Placement, PoolConfig, pool_config, unknown_pool_keys

RouterPolicy = Literal["round_robin", "least_loaded", "kv_aware"]
TransferSetting = Literal["auto", "nixl", "socket"]

HANDOFF_THRESHOLD = 512
"""Uncached prompt tokens above which a prefill pool computes the prompt, until the costs have been measured."""
DRAIN_SECONDS = 25.0
"""Time of a drain: Kubernetes kills a pod 30 s after SIGTERM."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TRACES_PATH = "/v1/traces"


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Thresholds that decide when a worker is unhealthy."""

    heartbeat: float = 0.5
    """Seconds between two heartbeats requested of a worker."""
    misses: int = 4
    """Consecutive missed heartbeats after which the gateway continues its streams on another worker. This detects a worker
    that hangs; a broken connection is detected at once."""
    stall: float = 2.0
    """Seconds that a step may take beyond its predicted time, with the same effect. The first steps of a size have a minute."""
    canary: float = 30.0
    """Seconds between two canary requests. 0 if there are none."""

    def __post_init__(self) -> None:
        if self.heartbeat <= 0 or self.misses < 1 or self.stall <= 0 or self.canary < 0:
            raise InvalidConfig("health: heartbeat and stall must be over 0, misses at least 1, canary 0 or more")


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Source of the weights of a starting worker."""

    from_peers: bool = True
    """Whether to load from workers that hold the model, several at once and layer by layer; from disk if there are none."""
    limit: float = 0.0
    """Most MB per second that one worker sends. 0 if there is no limit. A worker that serves requests also paces itself by the
    effect on its steps."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.limit < float("inf"):
            raise InvalidConfig(f"weights.limit must be MB per second, 0 for no limit, got {self.limit}")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    pools: tuple[PoolConfig, ...]
    name: str = "paceline"
    """Name that distinguishes clusters on one machine or in one Ray cluster."""
    host: str = "127.0.0.1"
    """Address that workers bind; on Ray, `auto` is the address of their node."""
    keys: str | None = None
    """Folder created by `paceline keys`. None if nothing is encrypted, which is allowed on loopback only."""
    state_dir: str | None = None
    """Folder for addresses and logs. If None, it is a folder named after the cluster in the user's state folder."""
    ray: str | None = None
    """Address of the Ray cluster that runs the workers. `auto` is the cluster of this machine. If None, the workers are local
    processes."""
    router: RouterPolicy = "least_loaded"
    health: HealthConfig = field(default_factory=HealthConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    handoff_threshold: int = HANDOFF_THRESHOLD
    """Uncached prompt tokens above which a prefill pool computes the prompt, until the costs have been measured."""
    transfer: TransferSetting = "auto"
    """Channel for KV blocks and weights between workers. `nixl` between machines is never encrypted, so `auto` uses it only
    without `keys`."""
    trace_endpoint: str | None = None
    """OpenTelemetry endpoint of workers and gateway. None if nothing is traced. The gateway decides which requests are
    traced."""
    drain_seconds: float = DRAIN_SECONDS
    """Time that a draining worker has, from SIGTERM to its exit, to finish its streams. Unfinished streams continue on another
    worker."""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the gateway: `host`, `port`, `sampling` and so on."""

    def __post_init__(self) -> None:
        if self.router not in get_args(RouterPolicy):
            raise InvalidConfig(f"router must be one of {', '.join(get_args(RouterPolicy))}, got {self.router!r}")
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise InvalidConfig(f"a cluster's name consists of letters, digits, - and _, got {self.name!r}")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise InvalidConfig(f"pools must have different names, got {', '.join(names)}")
        if not self.targets:
            raise InvalidConfig("there is no pool with role target: add one, it generates the tokens")
        self._check_models()
        if self.handoff_threshold < 1:
            raise InvalidConfig(f"handoff_threshold must be at least 1 token, got {self.handoff_threshold}")
        if not 0.0 <= self.drain_seconds < float("inf"):
            raise InvalidConfig(f"drain_seconds must be 0 or more, got {self.drain_seconds}")
        if self.transfer not in get_args(TransferSetting):
            raise InvalidConfig(
                f"transfer must be one of {', '.join(get_args(TransferSetting))}, got {self.transfer!r}"
            )
        if self.trace_endpoint is not None:
            trace_url(self.trace_endpoint)
        for pool in self.targets:
            pool.check_method(bool(self.drafts))
        self._check_prefills()
        self._check_engines()
        for pool in self.pools:
            other = pool.placement.with_pool
            if other is not None and (other not in names or other == pool.name):
                raise InvalidConfig(
                    f"pool {pool.name!r}: placement.with names {other!r}; other pools: "
                    f"{', '.join(name for name in names if name != pool.name) or 'none'}"
                )
        if self.keys is None and self.host not in LOOPBACK:
            raise InvalidConfig(
                f"workers on {self.host!r} can be reached from elsewhere: make keys with `paceline keys FOLDER` and set "
                "`keys: FOLDER`, or set host to 127.0.0.1"
            )

    @property
    def targets(self) -> tuple[PoolConfig, ...]:
        return tuple(pool for pool in self.pools if pool.role == "target")

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models in the API, in the order of the file."""
        return tuple(dict.fromkeys(pool.served_name for pool in self.targets))

    def for_model(self, model: str) -> "ClusterConfig":
        """The part of the cluster that serves one model: its target and prefill pools, and all draft pools. Draft workers and
        targets find out by their handshake which of them fit together."""
        pools = [pool for pool in self.pools if pool.role == "draft" or pool.served_name == model]
        names = {pool.name for pool in pools}
        return replace(
            self,
            pools=tuple(
                pool if pool.placement.with_pool in (None, *names) else replace(pool, placement=Placement())
                for pool in pools
            ),
        )

    @property
    def shares_caches(self) -> bool:
        """Whether targets of a model fetch cached blocks from each other: the router indexes blocks, and all caches share one
        layout. Several models: whether those of any model do."""
        if len(self.models) > 1:
            return any(self.for_model(model).shares_caches for model in self.models)
        pools = self.targets
        formats = {(pool.dtype, pool.quantization, pool.activations, pool.kv_dtype) for pool in pools}
        return self.router == "kv_aware" and len(formats) == 1 and pools[0].engine == "paceline"

    @property
    def prefills(self) -> tuple[PoolConfig, ...]:
        return tuple(pool for pool in self.pools if pool.role == "prefill")

    def _check_models(self) -> None:
        """Raise `InvalidConfig` unless all target pools of a name serve the same model."""
        for name in self.models:
            models = dict.fromkeys(pool.model for pool in self.targets if pool.served_name == name)
            if len(models) > 1:
                raise InvalidConfig(
                    f"the target pools of {name!r} serve different models, {' and '.join(models)}: "
                    "set another served_model_name"
                )

    def _check_prefills(self) -> None:
        """Raise `InvalidConfig` unless prefill and target workers compute the same KV cache."""
        for pool in self.prefills:
            if pool.served_name not in self.models:
                raise InvalidConfig(
                    f"pool {pool.name!r} prefills for no target pool: its model, or its served_model_name, must be one of "
                    f"{', '.join(self.models)}, got {pool.served_name!r}"
                )
            for target in self.targets:
                if target.served_name != pool.served_name:
                    continue
                for key in ("model", "dtype", "quantization", "activations", "kv_dtype"):
                    mine, theirs = getattr(pool, key), getattr(target, key)
                    if mine != theirs:
                        raise InvalidConfig(
                            f"pool {pool.name!r} prefills for {target.name!r}: its {key} must be {theirs!r} too, got {mine!r}"
                        )

    def _check_engines(self) -> None:
        """Raise `InvalidConfig` if the pools of a model have different engines, or a pool serves none of our engine."""
        engines = {pool.model: pool.engine for pool in self.targets}
        for pool in self.targets:
            if pool.engine != engines[pool.model]:
                raise InvalidConfig(
                    f"all target pools of {pool.model!r} must have the same engine: a text may continue on any of them"
                )
        for pool in (*self.drafts, *self.prefills):
            served = engines.values() if pool.role == "draft" else [engines.get(pool.model, "paceline")]
            if "paceline" not in served:
                advice = (
                    "vLLM drafts by its own settings or through the plugin" if pool.role == "draft" else "remove it"
                )
                raise InvalidConfig(f"pool {pool.name!r}: a {pool.role} pool serves Paceline targets only: {advice}")

    @property
    def drafts(self) -> tuple[PoolConfig, ...]:
        return tuple(pool for pool in self.pools if pool.role == "draft")

    def engines(self) -> dict[str, EngineConfig]:
        """Engine settings by worker name (`pool-0` and so on). The workers of a device share its memory whether or not they
        speculate at present."""
        workers = [(name, pool, i) for pool in self.pools for i, name in enumerate(pool.worker_names)]
        shares = device_shares([pool.memory_claim(name, i) for name, pool, i in workers])
        # Ray may reserve a fraction of a GPU for a worker
        parts = {name: min(pool.ray.num_gpus, 1.0) or 1.0 for name, pool, _ in workers}
        return {name: pool.engine_config(i, shares[name] * parts[name]) for name, pool, i in workers}


def cluster_config(document: Mapping[str, Any]) -> ClusterConfig:
    """The configuration in the file's contents. Raises `UnknownKeys`, or `InvalidConfig` with the path of a wrong type. It
    does not check the keys of `gateway`."""
    values = dict(document)
    pools, gateway = values.pop("pools", ()), values.pop("gateway", None) or {}
    unknown = [*unknown_keys(ClusterConfig, values)]
    if isinstance(pools, Sequence):
        unknown += [message for i, pool in enumerate(pools) for message in unknown_pool_keys(pool, i)]
    if unknown:
        raise UnknownKeys(unknown)
    if not isinstance(pools, Sequence) or isinstance(pools, str) or not pools:
        raise InvalidConfig("pools must be a list of at least one pool with name, role and model")
    if not isinstance(gateway, Mapping):
        raise InvalidConfig(f"gateway must be a mapping of server settings, got {gateway!r}")
    built = {"pools": tuple(pool_config(pool, i) for i, pool in enumerate(pools)), "gateway": dict(gateway)}
    return _with_devices(from_mapping(ClusterConfig, values | built))


def _with_devices(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the devices of pools that share those of another pool."""
    by_name = {pool.name: pool for pool in config.pools}
    pools = tuple(
        replace(pool, devices=by_name[pool.placement.with_pool].devices)
        if pool.placement.with_pool is not None and not pool.devices
        else pool
        for pool in config.pools
    )
    config = replace(config, pools=pools)
    config.engines()  # raises if the memory fractions of a device exceed it
    return config


def trace_url(endpoint: str) -> str:
    """URL that spans are posted to; an endpoint without a path gets `TRACES_PATH`. Raises `InvalidConfig`."""
    try:
        parts = urlsplit(endpoint)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidConfig(f"trace_endpoint must be a URL such as http://127.0.0.1:4318, got {endpoint!r}")
    return endpoint.rstrip("/") + TRACES_PATH if parts.path in ("", "/") else endpoint
