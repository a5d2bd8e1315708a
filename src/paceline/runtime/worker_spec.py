"""Everything a worker is started from, as a value that travels as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.cluster_config import ClusterConfig, Role
from paceline.core.config import EngineConfig, from_mapping
from paceline.runtime.directory import Member
from paceline.runtime.key_folder import KeyFolder


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
    uses_drafts: bool = False
    """Whether there is a draft pool that a target will be told of."""
    publishes: bool = False
    """Whether a target says what is in its cache."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "WorkerSpec":
        values: dict[str, Any] = json.loads(text)
        values["engine"] = from_mapping(EngineConfig, values["engine"])
        return WorkerSpec(**values)

    def member(self, address: str) -> Member:
        """As others reach it once it listens on `address`."""
        key = "" if self.keys is None else KeyFolder(Path(self.keys)).public(self.role)
        return Member(self.name, self.pool, self.role, address, key)


def worker_specs(config: ClusterConfig, addresses: Mapping[str, str], threads: int | None) -> list[WorkerSpec]:
    """One for each worker; `addresses` to bind, by name."""
    engines = config.engines()
    return [
        WorkerSpec(
            name=name,
            pool=pool.name,
            role=pool.role,
            address=addresses[name],
            engine=engines[name],
            keys=config.keys,
            threads=threads,
            uses_drafts=pool.role == "target" and bool(config.drafts),
            publishes=pool.role == "target" and config.router == "kv_aware",
        )
        for pool in config.pools
        for name in (f"{pool.name}-{i}" for i in range(pool.replicas))
    ]
