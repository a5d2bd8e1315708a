"""One pool of `cluster.yaml`: workers that are alike."""

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
from paceline.core.device_shares import Sharer
from paceline.core.errors import InvalidConfig

Role = Literal["target", "draft", "prefill"]

WEIGHTS: Mapping[str, float] = {"target": 4.0, "draft": 1.0, "prefill": 4.0}
"""How workers divide the memory of a device that they share."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


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

    @property
    def worker_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{i}" for i in range(self.replicas))

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

    def sharer(self, name: str, worker: int) -> Sharer:
        """What worker number `worker`, called `name`, takes of which devices."""
        devices = self.devices or ("auto",)
        first = devices[worker % len(devices)]
        kind, _, index = first.partition(":")
        if self.ray.num_gpus:
            occupied: tuple[str, ...] = (f"{name}'s own GPU",)
        elif kind == "cuda":
            occupied = tuple(f"cuda:{int(index or 0) + rank}" for rank in range(self.tensor_parallel_size))
        else:
            occupied = (first,)
        return Sharer(name, occupied, WEIGHTS[self.role], self.limits.memory_fraction)


def pool_config(value: Any, index: int) -> PoolConfig:
    """From entry number `index` of the file's `pools`."""
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
