"""A courier's lines to depots: which kind to take, and those that are kept for the next fetch."""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from paceline.runtime.transfer.channels.channel import Line, SocketLine
from paceline.runtime.transfer.channels.kinds import pick_kinds
from paceline.runtime.transfer.channels.memory_channel import MemoryLine
from paceline.runtime.transfer.channels.nixl_agent import NixlAgent
from paceline.runtime.transfer.channels.nixl_channel import NixlLine
from paceline.runtime.transfer.control import Control
from paceline.runtime.transfer.errors import KindUnavailable, TransferFailed
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.wire.keys import KeyPair, Security

IDLE_LINES = 8
"""Kept open in all: each may have a window's worth of memory."""
DEAD_END_SECONDS = 60.0


class _Depot(NamedTuple):
    address: str
    key: str


class _DeadEnd(NamedTuple):
    why: str
    until: float


class Lines:
    """Any thread may take one; it is that thread's until it gives it back or closes it."""

    def __init__(self, security: Security | None, kinds: Sequence[str] | None) -> None:
        self._kinds = pick_kinds(kinds, security)
        self._own: KeyPair | None = None if security is None else security.own
        self._idle: list[tuple[_Depot, Line]] = []
        """The one that was used last at the end."""
        self._dead_ends: dict[tuple[_Depot, str], _DeadEnd] = {}
        """Kinds that did not lead to a depot: they are not tried there again for a while."""
        self._agent: NixlAgent | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        self._agent_lock = threading.Lock()

    def __len__(self) -> int:
        """Those that are kept."""
        return len(self._idle)

    def take(self, ticket: Ticket) -> Line:
        """A line to the ticket's depot, by the best kind that both ends have and that leads there."""
        if (self._own is None) != (not ticket.key):
            who = (
                "the depot has no key and this worker has one"
                if self._own
                else "the depot has a key and this worker none"
            )
            raise TransferFailed(f"{who}: give keys to all workers, or to none")
        self._sweep()
        depot = _depot(ticket)
        with self._lock:
            for at in reversed(range(len(self._idle))):
                if self._idle[at][0] == depot:
                    return self._idle.pop(at)[1]
        return self._open(ticket)

    def keep(self, ticket: Ticket, line: Line) -> None:
        """It works, and nothing is under way on it."""
        with self._lock:
            self._idle.append((_depot(ticket), line))
            surplus = self._idle if self._is_closed else self._idle[:-IDLE_LINES]
            self._idle = self._idle[len(surplus) :]
        for _, one in surplus:
            one.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._agent = None
        for _, line in idle:
            line.close()

    def _sweep(self) -> None:
        """Lines to depots that are gone."""
        with self._lock:
            broken = [line for _, line in self._idle if line.is_broken()]
            self._idle = [one for one in self._idle if one[1] not in broken]
        for line in broken:
            line.close()

    def _open(self, ticket: Ticket) -> Line:
        why = f"the depot gives by {', '.join(ticket.addresses)} and this worker takes by {', '.join(self._kinds)}"
        for kind in self._kinds:
            if kind not in ticket.addresses:
                continue
            way, now = (_depot(ticket), kind), time.monotonic()
            with self._lock:
                self._dead_ends = {way: end for way, end in self._dead_ends.items() if now < end.until}
                dead_end = self._dead_ends.get(way)
            if dead_end is not None:
                why = dead_end.why
                continue
            try:
                return self._open_by(kind, ticket)
            except KindUnavailable as unavailable:
                why = str(unavailable)
                with self._lock:
                    self._dead_ends[way] = _DeadEnd(why, now + DEAD_END_SECONDS)
        raise TransferFailed(why)

    def _open_by(self, kind: str, ticket: Ticket) -> Line:
        if kind == "memory":
            return MemoryLine(ticket.addresses[kind])
        agent = self._nixl() if kind == "nixl" else None
        control = Control(ticket.addresses.get("socket", ""), self._own, ticket.key)
        return SocketLine(control) if agent is None else NixlLine(agent, control)

    def _nixl(self) -> NixlAgent:
        """From the first line by NIXL on: it takes a moment to set up."""
        with self._agent_lock:
            if self._agent is None:
                self._agent = NixlAgent("courier")
            return self._agent


def _depot(ticket: Ticket) -> _Depot:
    return _Depot(ticket.addresses.get("socket", ""), ticket.key)
