"""What a worker's process gets and returns as JSON, and the members of a cluster.

`WorkerSpec` specifies the worker. Its part `UpstreamSpec` says which server of another engine it serves, and `WeightSpec` says
where it loads weights from and how it serves them. `write_addresses` writes where the process listens, and `write_error` the
error that ended it. A `Directory` has the members of a cluster and their addresses.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from paceline.core import errors
from paceline.core.cluster_config import DRAIN_SECONDS, ClusterConfig, TransferSetting
from paceline.core.config import EngineConfig, from_mapping
from paceline.core.errors import PacelineError
from paceline.core.pool_config import PoolConfig, Role, TargetEngine
from paceline.core.status import WorkerLife
from paceline.wire.keys import KEY_ROLE_OF, KeyFolder


@dataclass(frozen=True, slots=True)
class UpstreamSpec:
    engine: TargetEngine
    url: str | None
    """URL of a running server. None if the worker starts vLLM."""
    executable: str
    arguments: tuple[str, ...]
    """Arguments of `vllm serve`."""
    kv_events: str | None
    """Address of the KV events that the server publishes. None if it publishes no events."""
    kv_replay: str | None
    api_key_env: str | None
    """Environment variable with the server's API key."""
    max_num_seqs: int | None
    max_model_len: int | None

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "UpstreamSpec":
        return UpstreamSpec(**{**values, "arguments": tuple(values["arguments"])})

    @staticmethod
    def of(pool: PoolConfig, worker: int) -> "UpstreamSpec | None":
        """The spec of worker number `worker`. It is None for a pool of our own engine."""
        if pool.engine == "paceline":
            return None
        upstream = pool.upstream
        return UpstreamSpec(
            engine=pool.engine,
            url=pool.endpoints[worker] if pool.endpoints else None,
            executable=upstream.executable,
            arguments=upstream.arguments,
            kv_events=upstream.kv_events[worker] if upstream.kv_events else None,
            kv_replay=upstream.kv_replays[worker] if upstream.kv_replays else None,
            api_key_env=upstream.api_key_env,
            max_num_seqs=pool.limits.max_num_seqs,
            max_model_len=pool.limits.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class PeerAddress:
    name: str
    address: str = ""
    """Address of its weight server. The port is 0 if it is known only once the peer runs."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    address: str
    """Address of the worker's own weight server to bind: tcp://host:port, port 0 for a free one."""
    peers: tuple[PeerAddress, ...] = ()
    """Other workers of the same model."""
    bytes_per_second: float = 0.0
    """Rate limit of the weight server. 0 means no limit."""

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "WeightSpec":
        peers = tuple(PeerAddress(**peer) for peer in values["peers"])
        return WeightSpec(values["address"], peers, values["bytes_per_second"])


def weight_specs(config: ClusterConfig, addresses: Mapping[str, str]) -> dict[str, WeightSpec]:
    """Specs by worker name. `addresses` has the addresses to bind under `weight_server_name`; workers without an address are
    absent. Workers with the same key and model are peers, whatever their number of ranks is."""
    if not config.weights.from_peers:
        return {}
    groups: dict[tuple[str, ...], list[str]] = {}
    for pool in config.pools:
        if pool.engine == "paceline":
            group = (KEY_ROLE_OF[pool.role], pool.model, pool.dtype, pool.quantization, pool.activations)
            names = [name for name in pool.worker_names if weight_server_name(name) in addresses]
            groups.setdefault(group, []).extend(names)
    limit = config.weights.limit * 1e6
    return {
        name: WeightSpec(addresses[weight_server_name(name)], _peers(names, name, addresses), limit)
        for names in groups.values()
        for name in names
    }


def weight_server_name(worker: str) -> str:
    """Key of the worker's weight server in a mapping of addresses."""
    return f"{worker}/weights"


def _peers(names: Sequence[str], own: str, addresses: Mapping[str, str]) -> tuple[PeerAddress, ...]:
    return tuple(PeerAddress(name, addresses[weight_server_name(name)]) for name in names if name != own)


Phase = Literal["trial", "serving", "draining", "gone"]
"""What a member is used for. A worker on `trial` gets canaries only, until its texts are compared. A `draining` worker gets no
new work. A worker that is `gone` has exited and is listed for a while."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as other processes reach it."""

    name: str
    pool: str
    role: Role
    address: str
    key: str = ""
    """Public key. It is empty without encryption."""
    life: WorkerLife = field(default_factory=WorkerLife)
    phase: Phase = "serving"
    revision: int = 0
    """Revision of the settings that it runs with."""
    model: str = ""
    """Name of the model in the API. It is empty for a draft worker."""


class Directory(Protocol):
    def members(self) -> Sequence[Member]:
        """All current members. The call may block for a moment, and is made at an interval."""
        ...


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """The members that serve one model, and all draft workers."""

    directory: Directory
    model: str

    def members(self) -> Sequence[Member]:
        return [member for member in self.directory.members() if member.role == "draft" or member.model == self.model]


@dataclass(frozen=True, slots=True)
class FixedDirectory:
    """A directory of fixed addresses."""

    known: tuple[Member, ...]

    def members(self) -> Sequence[Member]:
        return self.known


KINDS: dict[str, type[PacelineError]] = {
    kind.__name__: kind
    for kind in (
        errors.InvalidConfig,
        errors.UnsupportedModel,
        errors.IncompatibleDraft,
        errors.OutOfMemory,
        errors.EngineClosed,
        errors.RankLost,
    )
}
"""Errors that keep their type, because their constructor takes the message only. All other errors become a `PacelineError`."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    pool: str
    role: Role
    address: str
    """Address to bind: `tcp://host:port`, port 0 for a free one, or `ipc://path`."""
    engine: EngineConfig
    keys: str | None = None
    threads: int | None = None
    """CPU threads of the model. None stands for one thread per core."""
    model: str = ""
    """Name of the model in the API, of a target or prefill worker."""
    targets: tuple[str, ...] = ()
    """The target models of a draft worker. A trained draft uses the embedding and the head of the target that it was trained
    for."""
    uses_drafts: bool = False
    """Whether the cluster of this target worker has a draft pool."""
    publishes: bool = False
    """Whether a target worker publishes KV events."""
    handoff_threshold: int | None = None
    """Minimum prompt length at which a target worker hands the prompt off. None if it computes all prompts itself."""
    shares_cache: bool = False
    """Whether a target worker sends cached blocks to other targets."""
    weights: WeightSpec | None = None
    """Weight server and peers. None if the model is read from disk and not sent to other workers."""
    transfer: TransferSetting = "auto"
    """Transfer channel of KV blocks and weights."""
    trace_endpoint: str | None = None
    """OTLP endpoint to which a target worker sends its spans."""
    upstream: UpstreamSpec | None = None
    """The server of another engine behind a target worker. None if the target worker runs our engine."""
    address_file: str | None = None
    """File to which the worker writes the addresses at which it listens. None if its parent knows them."""
    error_file: str | None = None
    """File for the error that ends the worker, in a private folder of its parent; see `deploy/worker_error.py`."""
    log_level: str = "info"
    reports_phases: bool = False
    """Whether the worker writes `PhaseReport`s between its log lines, for a parent that shows them."""
    drain_seconds: float = DRAIN_SECONDS
    """Time from SIGTERM to the exit of the worker."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "WorkerSpec":
        values: dict[str, Any] = json.loads(text)
        values["engine"] = from_mapping(EngineConfig, values["engine"])
        values["targets"] = tuple(values["targets"])
        values["weights"] = values["weights"] and WeightSpec.from_mapping(values["weights"])
        values["upstream"] = values["upstream"] and UpstreamSpec.from_mapping(values["upstream"])
        return WorkerSpec(**values)

    def member(self, address: str) -> Member:
        """The worker as a member of the cluster, listening on `address`."""
        key = "" if self.keys is None else KeyFolder(Path(self.keys)).public_key(KEY_ROLE_OF[self.role])
        return Member(self.name, self.pool, self.role, address, key, model=self.model)


def worker_specs(config: ClusterConfig, addresses: Mapping[str, str], threads: int | None) -> list[WorkerSpec]:
    """One specification per worker in `addresses`, which has the addresses to bind, by name."""
    engines, weights = config.engines(), weight_specs(config, addresses)
    models = {model: config.for_model(model) for model in config.models}
    shares = {model: part.shares_caches for model, part in models.items()}
    uses_handoffs = {model: bool(part.prefills) or part.shares_caches for model, part in models.items()}
    target_models = tuple(dict.fromkeys(pool.model for pool in config.targets))
    return [
        WorkerSpec(
            name=name,
            pool=pool.name,
            role=pool.role,
            address=addresses[name],
            engine=engines[name],
            keys=config.keys,
            threads=threads,
            model="" if pool.role == "draft" else pool.served_name,
            targets=target_models if pool.role == "draft" else (),
            uses_drafts=pool.role == "target" and bool(config.drafts),
            publishes=pool.role == "target" and config.router == "kv_aware",
            handoff_threshold=config.handoff_threshold
            if pool.role == "target" and uses_handoffs[pool.served_name]
            else None,
            shares_cache=pool.role == "target" and shares[pool.served_name],
            weights=weights.get(name),
            transfer=config.transfer,
            trace_endpoint=config.trace_endpoint if pool.role == "target" else None,
            drain_seconds=config.drain_seconds,
            upstream=UpstreamSpec.of(pool, i),
        )
        for pool in config.pools
        for i, name in enumerate(pool.worker_names)
        if name in addresses
    ]


class WorkerAddresses(NamedTuple):
    """Where a worker listens, and its weight server. Empty if it does not, or not yet."""

    worker: str = ""
    weights: str = ""


def write_addresses(path: Path, addresses: WorkerAddresses) -> None:
    """Store the addresses for `read_addresses`, which finds all of them or none."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(addresses), "utf-8")
    unfinished.replace(path)


def read_addresses(path: Path) -> WorkerAddresses:
    """The stored addresses. They are empty until the worker has stored them."""
    try:
        return WorkerAddresses(*json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return WorkerAddresses()


def write_error(path: Path, error: Exception) -> None:
    """Store the error for `read_error`."""
    message = str(error) if isinstance(error, PacelineError) else f"the worker failed: {error!r}"
    path.write_text(json.dumps({"kind": type(error).__name__, "message": message}), "utf-8")


def read_error(path: Path, unknown: str) -> PacelineError:
    """The stored error. Without one, an error with the message `unknown`."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return PacelineError(unknown)
    return KINDS.get(document["kind"], PacelineError)(document["message"])
