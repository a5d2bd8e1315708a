"""One pool of `cluster.yaml`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from paceline.core.config import (
    AUDIT_FRACTION,
    ActivationFormat,
    CacheDtype,
    Dtype,
    EngineConfig,
    SpeculationConfig,
    WeightBits,
    from_mapping,
    unknown_keys,
)
from paceline.core.errors import InvalidConfig
from paceline.core.machine import MemoryClaim

Role = Literal["target", "draft", "prefill"]
TargetEngine = Literal["paceline", "vllm", "openai"]

WEIGHTS: Mapping[str, float] = {"target": 4.0, "draft": 1.0, "prefill": 4.0}
"""Relative memory shares of workers on one device, by role."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of one worker. A limit that is None depends on device and memory, as for one engine."""

    max_num_seqs: int | None = None
    """Most sequences at once. A draft worker answers `Busy` for further ones, which are then decoded without drafts."""
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    memory_fraction: float | None = None
    """Share of its device's memory. If None, the workers of a device divide 0.85, and a target gets four times a draft's
    share."""
    kv_host_bytes: int | None = None
    """Host memory for cached blocks, of a target or prefill worker."""
    kv_disk: str | None = None
    """Folder for cached blocks; every worker uses a subfolder of its own."""
    kv_disk_bytes: int | None = None
    worker_memory_bytes: int | None = None
    """Host memory of a target's process, from which on it takes less work. If None, that of its machine or container."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a pool's workers."""

    with_pool: str | None = None
    """Pool whose devices (and nodes, on Ray) this pool shares, worker by worker; `with` in the file."""


@dataclass(frozen=True, slots=True)
class RayResources:
    """Resources that Ray reserves for one worker."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    """GPUs, or a fraction of one that several workers share."""


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """Servers of another engine; see docs/endpoints.md."""

    executable: str = "vllm serve"
    """Command that starts vLLM, in front of the model's name."""
    arguments: tuple[str, ...] = ()
    """Arguments of vLLM, passed as they are."""
    kv_events: tuple[str, ...] = ()
    """Addresses of the KV events that the servers publish, such as tcp://127.0.0.1:5557, worker by worker."""
    kv_replays: tuple[str, ...] = ()
    """Addresses that send missed KV events again, worker by worker."""
    api_key_env: str | None = None
    """Environment variable with the API key of the servers."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Workers with the same role, model and settings."""

    name: str
    role: Role
    model: str
    replicas: int = 1
    devices: tuple[str, ...] = ()
    """Devices. Worker i runs on device i modulo their number. If it is empty, the pool has the devices of the pool that it is
    placed with, otherwise `auto`."""
    dtype: Dtype = "auto"
    quantization: WeightBits = "none"
    activations: ActivationFormat = "int8"
    kv_dtype: CacheDtype = "auto"
    tensor_parallel_size: int = 1
    """GPUs that share one worker's model, starting at its device. A draft worker has one."""
    placement: Placement = field(default_factory=Placement)
    limits: PoolLimits = field(default_factory=PoolLimits)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Speculation settings of a target pool."""
    draft: str | None = None
    """Draft that runs in the workers of a target pool."""
    served_model_name: str | None = None
    """Name of the model in the API, by default the value of `model`. Target and prefill pools with the same name work
    together."""
    audit_fraction: float = AUDIT_FRACTION
    """Share of texts that a worker of a target pool checks, also under load; see docs/audit.md."""
    ray: RayResources = field(default_factory=RayResources)
    engine: TargetEngine = "paceline"
    """Engine of a target pool. `vllm` and `openai` are servers behind this gateway, see docs/endpoints.md."""
    endpoints: tuple[str, ...] = ()
    """URLs of running servers of that engine, one worker each. If it is empty, the workers start vLLM."""
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)
    price: float | None = None
    """Dollars per hour of one worker. None if it is not known."""

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise InvalidConfig(f"pool {self.name!r}: role must be target, draft or prefill, got {self.role!r}")
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise InvalidConfig(f"a pool's name consists of letters, digits, - and _, got {self.name!r}")
        least = 1 if self.role == "target" else 0
        if self.replicas < least:
            raise InvalidConfig(f"pool {self.name!r}: replicas must be at least {least}, got {self.replicas}")
        if self.price is not None and not 0.0 <= self.price < float("inf"):
            raise InvalidConfig(f"pool {self.name!r}: price must be dollars per hour, 0 or more, got {self.price}")
        if self.role == "draft" and (self.limits.kv_host_bytes or self.limits.kv_disk):
            raise InvalidConfig(f"pool {self.name!r}: a draft's cache has no tiers; remove kv_host_bytes and kv_disk")
        if self.role == "draft" and self.tensor_parallel_size != 1:
            raise InvalidConfig(f"pool {self.name!r}: a draft runs on one device; set tensor_parallel_size to 1")
        if self.role == "draft" and self.served_model_name is not None:
            raise InvalidConfig(
                f"pool {self.name!r}: a draft pool drafts for every model with its tokenizer; remove served_model_name"
            )
        if self.role != "target" and (self.speculation != SpeculationConfig() or self.draft is not None):
            raise InvalidConfig(
                f"pool {self.name!r}: speculation and draft are settings of target pools; move them there"
            )

        self._check_engine()

    def check_method(self, has_drafts: bool) -> None:
        """Raises `InvalidConfig` for a speculation method that its workers do not have. `has_drafts` is true if the cluster has
        a draft pool."""
        try:
            self.speculation.check_method(self.draft, has_drafts)
        except InvalidConfig as error:
            raise InvalidConfig(f"pool {self.name!r}: {error}") from None

    def _check_engine(self) -> None:
        if self.engine not in get_args(TargetEngine):
            raise InvalidConfig(
                f"pool {self.name!r}: engine must be {', '.join(get_args(TargetEngine))}, got {self.engine!r}"
            )
        if self.engine == "paceline":
            if self.endpoints or self.upstream != UpstreamConfig():
                raise InvalidConfig(f"pool {self.name!r}: endpoints and upstream need engine: vllm or engine: openai")
            return
        if self.role != "target":
            raise InvalidConfig(f"pool {self.name!r}: engine {self.engine} is for target pools")
        if self.engine == "openai" and not self.endpoints:
            raise InvalidConfig(f"pool {self.name!r}: engine openai needs endpoints, a list of URLs")
        if self.endpoints and (self.replicas != len(self.endpoints) or self.upstream.arguments):
            raise InvalidConfig(
                f"pool {self.name!r}: there is one worker for each of the {len(self.endpoints)} endpoints, which already "
                "run: leave out replicas and upstream.arguments"
            )
        for key, values in (("kv_events", self.upstream.kv_events), ("kv_replays", self.upstream.kv_replays)):
            if values and len(values) != self.replicas:
                raise InvalidConfig(f"pool {self.name!r}: upstream.{key} needs one address for each of its workers")
        if self.speculation != SpeculationConfig() or self.draft is not None or self.tensor_parallel_size != 1:
            raise InvalidConfig(
                f"pool {self.name!r}: speculation, draft and tensor_parallel_size are settings of our engine: set those of "
                "vLLM in upstream.arguments"
            )

    @property
    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{i}" for i in range(self.replicas))

    @property
    def served_name(self) -> str:
        """Name of the model in the API."""
        return self.served_model_name or self.model

    def engine_config(self, worker: int, memory_fraction: float) -> EngineConfig:
        """Engine settings of worker number `worker`."""
        given = {
            name: value
            for name in (
                "max_num_seqs",
                "max_batched_tokens",
                "max_model_len",
                "kv_tokens",
                "kv_host_bytes",
                "kv_disk_bytes",
                "worker_memory_bytes",
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
            activations=self.activations,
            kv_dtype=self.kv_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            memory_fraction=memory_fraction,
            draft=self.draft,
            audit_fraction=self.audit_fraction if self.role == "target" else 0.0,
            kv_disk=None if folder is None else f"{folder}/{self.name}-{worker}",
            speculation=SpeculationConfig(enabled=False) if self.role == "prefill" else self.speculation,
            **given,
        )

    def memory_claim(self, name: str, worker: int) -> MemoryClaim:
        """Claim of worker number `worker`, called `name`, on its devices."""
        devices = self.devices or ("auto",)
        first = devices[worker % len(devices)]
        if self.engine != "paceline":  # its server manages memory itself
            return MemoryClaim(name, (f"the server of {name}",), WEIGHTS[self.role], self.limits.memory_fraction)
        kind, _, index = first.partition(":")
        if self.ray.num_gpus:
            occupied: tuple[str, ...] = (f"{name}'s own GPU",)
        elif kind == "cuda":
            occupied = tuple(f"cuda:{int(index or 0) + rank}" for rank in range(self.tensor_parallel_size))
        else:
            occupied = (first,)
        return MemoryClaim(name, occupied, WEIGHTS[self.role], self.limits.memory_fraction)


def unknown_pool_keys(value: Any, index: int) -> Iterator[str]:
    """A message for each unknown key of entry number `index` of `pools` in the file."""
    if isinstance(value, Mapping):
        # The key `with` of a placement is not the name of its field.
        known = {key: inner for key, inner in value.items() if key != "placement"}
        yield from unknown_keys(PoolConfig, known, f"pools[{index}].")


def pool_config(value: Any, index: int) -> PoolConfig:
    """Pool from entry number `index` of `pools` in the file, which has no unknown keys."""
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
    if "endpoints" in values:
        values["endpoints"] = _texts(values["endpoints"], f"{where}endpoints")
        values.setdefault("replicas", len(values["endpoints"]))
    if isinstance(values.get("upstream"), Mapping):
        lists = ("arguments", "kv_events", "kv_replays")
        given = {
            key: _texts(texts, f"{where}upstream.{key}") for key, texts in values["upstream"].items() if key in lists
        }
        values["upstream"] = {**values["upstream"], **given}
    pool = from_mapping(PoolConfig, values, where)
    return replace(pool, devices=tuple(devices), placement=Placement(placement.get("with")))


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """A list of texts of the file as a tuple. A number counts as its text: arguments of a command have no types."""
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(v, str | int | float) for v in value)
    ):
        raise InvalidConfig(f"{where} must be a list of texts, got {value!r}")
    return tuple(map(str, value))
