"""The members of a cluster and their addresses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.pool_config import Role
from paceline.core.worker_status import WorkerLife


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as other processes reach it."""

    name: str
    pool: str
    role: Role
    address: str
    key: str = ""
    """Public key; empty without encryption."""
    life: WorkerLife = field(default_factory=WorkerLife)


class Directory(Protocol):
    def members(self) -> Sequence[Member]:
        """All current members. May block for a moment; called at an interval."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDirectory:
    """A directory of fixed addresses."""

    known: tuple[Member, ...]

    def members(self) -> Sequence[Member]:
        return self.known
