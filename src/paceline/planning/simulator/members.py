"""Workers of a simulated cluster: their state, what they serve, and the time that they are paid for."""

from dataclasses import dataclass, field
from typing import Literal

from paceline.core.pool_config import Role
from paceline.planning import ROLES, PoolState
from paceline.planning.simulator.draft_pool import PooledDrafts
from paceline.planning.simulator.worker import SimulatedWorker

MemberState = Literal["starting", "ready", "draining", "lost", "gone"]


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """One worker. A draft worker has no `worker`, since `DraftWorkers` holds its sequences."""

    id: int
    name: str
    role: Role
    since: float
    """Time at which it was requested."""
    state: MemberState
    worker: SimulatedWorker | None = None
    drafts: PooledDrafts | None = None
    assigned: int = 0
    """Unfinished requests."""
    until: float | None = None
    """Time at which it left."""
    restarts: int = 0

    def seconds(self, now: float) -> float:
        """Time that it is paid for."""
        return (now if self.until is None else self.until) - self.since


@dataclass(slots=True)
class Members:
    """All workers that ever were, by id."""

    all: dict[int, SimulatedMember] = field(default_factory=dict)
    by_name: dict[str, SimulatedMember] = field(default_factory=dict)
    _counts: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))

    def add(self, role: Role, now: float, state: MemberState) -> SimulatedMember:
        number = self._counts[role]
        self._counts[role] += 1
        member = SimulatedMember(len(self.all), f"{role}-{number}", role, now, state)
        self.all[member.id] = self.by_name[member.name] = member
        return member

    def of(self, role: Role, *states: MemberState) -> list[SimulatedMember]:
        return [member for member in self.all.values() if member.role == role and member.state in states]

    def pool(self, role: Role) -> PoolState:
        counted = {state: len(self.of(role, state)) for state in ("ready", "starting", "draining")}
        return PoolState(counted["ready"], counted["starting"], counted["draining"])

    def paid_seconds(self, role: Role, now: float) -> float:
        return sum(member.seconds(now) for member in self.all.values() if member.role == role)
