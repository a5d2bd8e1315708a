"""A connection that records what the parts of the pool do with it, without a socket."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from paceline.core.request import SamplingParams
from paceline.drafting.connection import DraftAddress, DraftConnection, DraftConnections, DraftCounters
from paceline.policy.pairing.pairing import RoundTrip
from paceline.speculation.proposer import SequenceProgress
from paceline.wire.draft_messages import FromDraft, Load


@dataclass(eq=False)
class FakeConnection:
    name: str = "draft-0"
    epoch: int = 1
    is_ready: bool = True
    silent: bool = False
    needs_ping: bool = False
    counters: DraftCounters = field(default_factory=DraftCounters)
    round_trip: RoundTrip = field(default_factory=RoundTrip)
    load: Load = field(default_factory=Load)
    incoming: deque[FromDraft] = field(default_factory=deque)
    calls: list[Any] = field(default_factory=list)

    @property
    def where(self) -> DraftAddress:
        return DraftAddress(self.name, "tcp://unused")

    @property
    def transport(self) -> "FakeConnection":
        return self

    def as_connection(self) -> DraftConnection:
        return cast(DraftConnection, self)

    def receive(self, now: float, was_awaited: bool) -> FromDraft | None:
        return self.incoming.popleft() if self.incoming else None

    def is_silent(self, now: float) -> bool:
        return self.silent

    def needs_awaited_ping(self, now: float) -> bool:
        return self.needs_ping

    def maintain(self, now: float) -> None:
        self.calls.append("maintain")

    def mark_busy(self, until: float) -> None:
        self.calls.append(("busy", until))

    def lose(self, now: float, reason: str) -> None:
        self.calls.append(("lose", reason))

    def repeat_hello(self, now: float) -> None:
        self.calls.append("hello")

    def refuse(self, now: float, reason: str) -> None:
        self.calls.append(("refuse", reason))

    def record_success(self) -> None: ...

    def record_fault(self, what: str) -> None:
        self.calls.append(("fault", what))


class FakeConnections:
    """The interface of `DraftConnections` that is read."""

    def __init__(self, *connections: FakeConnection) -> None:
        self.all = connections

    def as_connections(self) -> DraftConnections:
        return cast(DraftConnections, self)


def progress(number: int, *ids: int, depth: int = 3, max_levels: int | None = None) -> SequenceProgress:
    sampling = SamplingParams(temperature=0.0)
    return SequenceProgress(number, ids or (1, 2), depth, sampling, 1, 0, 1, "coupled", max_levels=max_levels)
