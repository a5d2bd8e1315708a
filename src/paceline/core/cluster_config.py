"""`cluster.yaml`: which pools there are, how many workers each has, and where they run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.core.config import (
    AUDIT_FRACTION,
    CacheDtype,
    Dtype,
    EngineConfig,
    SpeculationConfig,
    WeightBits,
    from_mapping,
)
from paceline.core.device_shares import Sharer, device_shares
from paceline.core.errors import InvalidConfig
from paceline.core.trace_endpoint import trace_url

Role = Literal["target", "draft", "prefill"]
RouterPolicy = Literal["round_robin", "least_loaded", "kv_aware"]
Transfer = Literal["auto", "nixl", "socket"]

WEIGHTS: Mapping[str, float] = {"target": 4.0, "draft": 1.0, "prefill": 4.0}
"""How workers divide the memory of a device that they share."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
HANDOFF_THRESHOLD = 512
"""Uncached tokens beyond which a prompt goes to a prefill pool, until it is measured what that takes."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """What one worker takes on. None: as `EngineConfig` has it, or what the memory gives."""

    max_num_seqs: int | None = None
    """Sequences at once. A draft worker answers further ones with `Busy`, and they are decoded plainly."""
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    memory_fraction: float | None = None
    """Of its device. None: workers on the same device share 0.85 of it, a target four times what a draft gets."""
    kv_host_bytes: int | None = None
    """Of a target or prefill worker: memory of the host for cached blocks."""
    kv_disk: str | None = None
    """And a folder for them, in which every worker has its own."""
    kv_disk_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a pool's workers go."""

    beside: str | None = None
    """`with` in the file: the pool whose devices and, on Ray, nodes this one shares, worker by worker."""


@dataclass(frozen=True, slots=True)
class RayResources:
    """What Ray reserves for one worker."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    """May be a fraction: workers that share a GPU."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A pool: workers that are alike."""

    name: str
    role: Role
    model: str
    replicas: int = 1
    devices: tuple[str, ...] = ()
    """Worker i runs on device i, modulo their number. Empty: those of the pool it is placed with, otherwise `auto`."""
    dtype: Dtype = "auto"
    quantization: WeightBits = "none"
    kv_dtype: CacheDtype = "auto"
    tensor_parallel_size: int = 1
    """GPUs that share one worker's model, counted from its device on; a draft has one."""
    placement: Placement = field(default_factory=Placement)
    limits: PoolLimits = field(default_factory=PoolLimits)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Of a target pool."""
    draft: str | None = None
    """Of a target pool: a head or a draft model that runs beside the target, in the same worker."""
    audit_fraction: float = AUDIT_FRACTION
    """Of a target pool: the share of texts that a worker checks in idle moments; see docs/audit.md."""
    ray: RayResources = field(default_factory=RayResources)

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise InvalidConfig(f"pool {self.name!r}: role must be target, draft or prefill, got {self.role!r}")
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise InvalidConfig(f"a pool's name has letters, digits, - and _, got {self.name!r}")
        if self.replicas < 1:
            raise InvalidConfig(f"pool {self.name!r}: replicas must be at least 1, got {self.replicas}")
        if self.role == "draft" and (self.limits.kv_host_bytes or self.limits.kv_disk):
            raise InvalidConfig(
                f"pool {self.name!r}: a draft's cache has no tiers; leave out kv_host_bytes and kv_disk"
            )
        if self.role != "target" and self.tensor_parallel_size != 1:
            raise InvalidConfig(f"pool {self.name!r}: a {self.role} runs on one device; set tensor_parallel_size to 1")
        if self.role != "target" and (self.speculation != SpeculationConfig() or self.draft is not None):
            raise InvalidConfig(
                f"pool {self.name!r}: speculation and draft are settings of target pools; move them there"
            )

    def engine(self, worker: int, memory_fraction: float) -> EngineConfig:
        """What worker number `worker` is built from."""
        given = {
            name: value
            for name in (
                "max_num_seqs",
                "max_batched_tokens",
                "max_model_len",
                "kv_tokens",
                "kv_host_bytes",
                "kv_disk_bytes",
            )
            if (value := getattr(self.limits, name)) is not None
        }
        folder = self.limits.kv_disk
        devices = self.devices or ("auto",)
        return EngineConfig(
            model=self.model,
            device=devices[worker % len(devices)],
            dtype=self.dtype,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            memory_fraction=memory_fraction,
            draft=self.draft,
            audit_fraction=self.audit_fraction if self.role == "target" else 0.0,
            kv_disk=None if folder is None else f"{folder}/{self.name}-{worker}",
            speculation=SpeculationConfig(enabled=False) if self.role == "prefill" else self.speculation,
            **given,
        )


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """When a worker counts as gone, ill or well again."""

    heartbeat: float = 0.5
    """Seconds between two signs of life asked of a worker."""
    misses: int = 20
    """Heartbeats unanswered in a row until its streams are continued elsewhere. That is for a worker that hangs: one whose
    connection breaks, as it does when a process dies, is not waited for."""
    stall: float = 60.0
    """Seconds without a step, with work to do, that do the same."""
    canary: float = 30.0
    """Seconds between two canary generations; 0: none."""

    def __post_init__(self) -> None:
        if self.heartbeat <= 0 or self.misses < 1 or self.stall <= 0 or self.canary < 0:
            raise InvalidConfig("health: heartbeat and stall must be over 0, misses at least 1, canary 0 or more")


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Where a worker that starts gets its model from."""

    from_peers: bool = True
    """From workers that have it already, several at once and layer by layer; from disk where there are none."""
    limit: float = 1000.0
    """MB a second that one worker gives away at the most, and a quarter of that while it serves; 0: no limit."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.limit < float("inf"):
            raise InvalidConfig(f"weights.limit must be MB a second, 0 for no limit, got {self.limit}")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    pools: tuple[PoolConfig, ...]
    name: str = "paceline"
    """Tells clusters on one machine, or in one Ray, apart."""
    host: str = "127.0.0.1"
    """Address that workers bind; on Ray `auto` is their node's own."""
    keys: str | None = None
    """Folder that `paceline keys` made. None: no encryption, which only loopback may do without."""
    state_dir: str | None = None
    """Where addresses and logs are kept. None: a folder of this cluster's name under the user's state folder."""
    ray: str | None = None
    """Address of a Ray cluster that runs the workers, `auto` for the one this machine belongs to. None: local processes."""
    router: RouterPolicy = "least_loaded"
    health: HealthConfig = field(default_factory=HealthConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    handoff_threshold: int = HANDOFF_THRESHOLD
    """See `HANDOFF_THRESHOLD`."""
    transfer: Transfer = "auto"
    """How KV and weights go from worker to worker. `nixl` between machines is not encrypted, `keys` or not; `auto` uses it only
    where there are no keys."""
    trace_endpoint: str | None = None
    """Where workers and gateway send OpenTelemetry spans; None: nowhere. Which requests have any, the gateway decides."""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the server in front: `host`, `port`, `sampling` and so on."""

    def __post_init__(self) -> None:
        if self.router not in get_args(RouterPolicy):
            raise InvalidConfig(f"router must be one of {', '.join(get_args(RouterPolicy))}, got {self.router!r}")
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise InvalidConfig(f"a cluster's name has letters, digits, - and _, got {self.name!r}")
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise InvalidConfig(f"pools need names of their own, got {', '.join(names)}")
        if not self.targets:
            raise InvalidConfig("there is no pool with role target: nobody would generate anything")
        if len({pool.model for pool in self.targets}) > 1:
            raise InvalidConfig("all target pools must serve the same model; run a cluster for each model")
        if self.handoff_threshold < 1:
            raise InvalidConfig(f"handoff_threshold must be at least 1 token, got {self.handoff_threshold}")
        if self.transfer not in get_args(Transfer):
            raise InvalidConfig(f"transfer must be one of {', '.join(get_args(Transfer))}, got {self.transfer!r}")
        if self.trace_endpoint is not None:
            trace_url(self.trace_endpoint)
        self._check_prefills()
        for pool in self.pools:
            other = pool.placement.beside
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
    def shares_caches(self) -> bool:
        """Whether targets take cached blocks from each other: the router knows who has what, and they are laid out alike."""
        pools = self.targets
        shapes = {(pool.dtype, pool.quantization, pool.kv_dtype, pool.tensor_parallel_size) for pool in pools}
        is_whole = len(shapes) == 1 and pools[0].tensor_parallel_size == 1
        return self.router == "kv_aware" and is_whole and sum(pool.replicas for pool in pools) > 1

    @property
    def prefills(self) -> tuple[PoolConfig, ...]:
        return tuple(pool for pool in self.pools if pool.role == "prefill")

    def _check_prefills(self) -> None:
        """What is computed on one worker must be what another would have computed."""
        for pool in self.prefills:
            for target in self.targets:
                for key in ("model", "dtype", "quantization", "kv_dtype"):
                    mine, theirs = getattr(pool, key), getattr(target, key)
                    if mine != theirs:
                        raise InvalidConfig(
                            f"pool {pool.name!r} prefills for {target.name!r}: its {key} must be {theirs!r} too, got {mine!r}"
                        )
                if target.tensor_parallel_size != 1:
                    raise InvalidConfig(
                        f"pool {target.name!r}: a cache that is divided over devices is not handed over; set "
                        f"tensor_parallel_size to 1, or leave out the prefill pool {pool.name!r}"
                    )

    @property
    def drafts(self) -> tuple[PoolConfig, ...]:
        return tuple(pool for pool in self.pools if pool.role == "draft")

    def engines(self) -> dict[str, EngineConfig]:
        """By worker name, `pool-0` and so on. Memory is divided so that all workers of a device fit together, whether they
        speculate now or later."""
        workers = [(f"{pool.name}-{i}", pool, i) for pool in self.pools for i in range(pool.replicas)]
        shares = device_shares([_sharer(name, pool, i) for name, pool, i in workers])
        # Of a GPU that Ray divides a worker gets the fraction that was reserved for it
        parts = {name: min(pool.ray.num_gpus, 1.0) or 1.0 for name, pool, _ in workers}
        return {name: pool.engine(i, shares[name] * parts[name]) for name, pool, i in workers}


def cluster_config(document: Mapping[str, Any]) -> ClusterConfig:
    """From the file's contents. Unknown keys and wrong types are refused, with where they stand."""
    values = dict(document)
    pools, gateway = values.pop("pools", ()), values.pop("gateway", None) or {}
    if not isinstance(pools, Sequence) or isinstance(pools, str) or not pools:
        raise InvalidConfig("pools must be a list of at least one pool with name, role and model")
    if not isinstance(gateway, Mapping):
        raise InvalidConfig(f"gateway must be a mapping of server settings, got {gateway!r}")
    rest = from_mapping(_Rest, values)
    checked = {name: getattr(rest, name) for name in _Rest.__dataclass_fields__}
    return _placed(
        ClusterConfig(tuple(_pool(pool, i) for i, pool in enumerate(pools)), gateway=dict(gateway), **checked)
    )


@dataclass(frozen=True, slots=True)
class _Rest:
    """The keys of the file beside `pools` and `gateway`."""

    name: str = "paceline"
    host: str = "127.0.0.1"
    keys: str | None = None
    state_dir: str | None = None
    ray: str | None = None
    router: RouterPolicy = "least_loaded"
    health: HealthConfig = field(default_factory=HealthConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    handoff_threshold: int = HANDOFF_THRESHOLD
    transfer: Transfer = "auto"
    trace_endpoint: str | None = None


def _pool(value: Any, index: int) -> PoolConfig:
    where = f"pools[{index}]."
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"pools[{index}] must be a mapping with name, role and model, got {value!r}")
    values = dict(value)
    missing = [key for key in ("name", "role", "model") if key not in values]
    if missing:
        raise InvalidConfig(f"pools[{index}] lacks {', '.join(missing)}")
    devices = values.pop("devices", ())
    devices = (devices,) if isinstance(devices, str) else devices
    if not isinstance(devices, Sequence) or not all(isinstance(d, str) and _DEVICE.fullmatch(d) for d in devices):
        raise InvalidConfig(f"{where}devices must be a list such as [cuda:0, cuda:1], got {devices!r}")
    placement = values.pop("placement", None) or {}
    if not isinstance(placement, Mapping) or set(placement) - {"with"}:
        raise InvalidConfig(f"{where}placement must be {{with: POOL}}, got {placement!r}")
    pool = from_mapping(PoolConfig, values, where)
    return replace(pool, devices=tuple(devices), placement=Placement(placement.get("with")))


def _sharer(name: str, pool: PoolConfig, worker: int) -> Sharer:
    devices = pool.devices or ("auto",)
    first = devices[worker % len(devices)]
    kind, _, index = first.partition(":")
    if pool.ray.num_gpus:
        occupied: tuple[str, ...] = (f"{name}'s own GPU",)
    elif kind == "cuda":
        occupied = tuple(f"cuda:{int(index or 0) + rank}" for rank in range(pool.tensor_parallel_size))
    else:
        occupied = (first,)
    return Sharer(name, occupied, WEIGHTS[pool.role], pool.limits.memory_fraction)


def _placed(config: ClusterConfig) -> ClusterConfig:
    """Pools without devices of their own take those of the pool they are placed with."""
    by_name = {pool.name: pool for pool in config.pools}
    pools = tuple(
        replace(pool, devices=by_name[pool.placement.beside].devices)
        if pool.placement.beside is not None and not pool.devices
        else pool
        for pool in config.pools
    )
    config = replace(config, pools=pools)
    config.engines()  # memory that does not add up is told now
    return config
