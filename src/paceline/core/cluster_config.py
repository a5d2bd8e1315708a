"""`cluster.yaml`: which pools there are, how many workers each has, and where they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.core.config import EngineConfig, from_mapping
from paceline.core.device_shares import device_shares
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig, pool_config
from paceline.core.trace_endpoint import trace_url

RouterPolicy = Literal["round_robin", "least_loaded", "kv_aware"]
Transfer = Literal["auto", "nixl", "socket"]

HANDOFF_THRESHOLD = 512
"""Uncached tokens beyond which a prompt goes to a prefill pool, until it is measured what that takes."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
        workers = [(name, pool, i) for pool in self.pools for i, name in enumerate(pool.worker_names)]
        shares = device_shares([pool.sharer(name, i) for name, pool, i in workers])
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
    built = {"pools": tuple(pool_config(pool, i) for i, pool in enumerate(pools)), "gateway": dict(gateway)}
    return _placed(from_mapping(ClusterConfig, values | built))


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
