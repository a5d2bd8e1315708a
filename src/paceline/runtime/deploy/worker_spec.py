"""Everything a worker is started from, as a value that travels as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.cluster_config import ClusterConfig, TransferSetting
from paceline.core.config import EngineConfig, from_mapping
from paceline.core.pool_config import Role
from paceline.runtime.deploy.directory import Member
from paceline.runtime.weights.spec import WeightSpec, weight_specs
from paceline.runtime.wire.keys import KEY_ROLE_OF, KeyFolder


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    pool: str
    role: Role
    address: str
    """To bind: tcp://host:port, port 0 for a free one."""
    engine: EngineConfig
    keys: str | None = None
    threads: int | None = None
    """CPU threads for models; None: one a core."""
    target: str | None = None
    """Of a draft worker: the model it drafts for, whose embedding and head a trained draft borrows."""
    uses_drafts: bool = False
    """Whether there is a draft pool that a target will be told of."""
    publishes: bool = False
    """Whether a target says what is in its cache."""
    handoff_threshold: int | None = None
    """Of a target with prefill pools or peers; None: it computes all prompts itself."""
    gives: bool = False
    """Whether a target gives others what it has cached."""
    weights: WeightSpec | None = None
    """None: the model is read from disk, and given to nobody."""
    transfer: TransferSetting = "auto"
    """How KV and weights go from and to others."""
    trace_endpoint: str | None = None
    """Of a target: where its spans go."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "WorkerSpec":
        values: dict[str, Any] = json.loads(text)
        values["engine"] = from_mapping(EngineConfig, values["engine"])
        values["weights"] = values["weights"] and WeightSpec.from_mapping(values["weights"])
        return WorkerSpec(**values)

    def member(self, address: str) -> Member:
        """As others reach it once it listens on `address`."""
        key = "" if self.keys is None else KeyFolder(Path(self.keys)).public_key(KEY_ROLE_OF[self.role])
        return Member(self.name, self.pool, self.role, address, key)


def worker_specs(config: ClusterConfig, addresses: Mapping[str, str], threads: int | None) -> list[WorkerSpec]:
    """One for each worker; `addresses` to bind, by name."""
    engines, weights = config.engines(), weight_specs(config, addresses)
    takes = bool(config.prefills) or config.shares_caches
    return [
        WorkerSpec(
            name=name,
            pool=pool.name,
            role=pool.role,
            address=addresses[name],
            engine=engines[name],
            keys=config.keys,
            threads=threads,
            target=config.targets[0].model if pool.role == "draft" else None,
            uses_drafts=pool.role == "target" and bool(config.drafts),
            publishes=pool.role == "target" and config.router == "kv_aware",
            handoff_threshold=config.handoff_threshold if pool.role == "target" and takes else None,
            gives=pool.role == "target" and config.shares_caches,
            weights=weights.get(name),
            transfer=config.transfer,
            trace_endpoint=config.trace_endpoint if pool.role == "target" else None,
        )
        for pool in config.pools
        for name in pool.worker_names
    ]
