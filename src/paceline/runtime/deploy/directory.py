"""The members of a cluster and their addresses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.core.pool_config import Role
from paceline.core.status.worker import WorkerLife

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
    """Public key. Empty without encryption."""
    life: WorkerLife = field(default_factory=WorkerLife)
    phase: Phase = "serving"
    revision: int = 0
    """Revision of the settings that it runs with."""
    model: str = ""
    """Name of the model in the API. Empty for a draft worker."""


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
