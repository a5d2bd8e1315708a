"""Who belongs to a cluster, and where they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.pool_config import Role


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as others reach it."""

    name: str
    pool: str
    role: Role
    address: str
    key: str = ""
    """Its public key; empty without encryption."""


class Directory(Protocol):
    def members(self) -> Sequence[Member]:
        """Everybody who should be there now. May block for a moment; called again and again."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDirectory:
    """Addresses that do not change."""

    known: tuple[Member, ...]

    def members(self) -> Sequence[Member]:
        return self.known
