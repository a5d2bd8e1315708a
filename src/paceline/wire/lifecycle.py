"""When a worker serves, drains and ends. Workers of all kinds share it.

A worker that ends without a drain stops at once, and its peers continue elsewhere. A drain gives the running work some time.
"""

import secrets
from collections.abc import Iterable
from typing import Any

from paceline.core.clock import Clock
from paceline.wire.draft_messages import Goodbye
from paceline.wire.transport import Listener, Peer


class Lifecycle:
    """Any thread may call `stop`, `drain` and `wake`. The worker's thread, which owns the listener, uses the rest."""

    def __init__(self, listener: Listener[Any], clock: Clock, epoch_bits: int = 62) -> None:
        """`epoch_bits` is the size of the random epoch."""
        self.clock = clock
        self.is_stopping = False
        self.drain_seconds: float | None = None
        """Seconds that the drain may take. None if the worker does not drain."""
        self._drain_start = 0.0
        self._listener, self._epoch_bits = listener, epoch_bits
        self.renew_epoch()

    def renew_epoch(self) -> None:
        """Messages of peers for the epoch before are refused from now on."""
        self.epoch = secrets.randbits(self._epoch_bits)

    def wake(self) -> None:
        """End the wait of the worker's thread."""
        self._listener.wake()

    def stop(self) -> None:
        """The worker's `run` returns soon after."""
        self.is_stopping = True
        self.wake()

    def drain(self, seconds: float) -> None:
        """Take no new work. The worker's `run` returns when the rest is done, at most `seconds` from now. A repeated call
        changes nothing."""
        if self.drain_seconds is None:
            self._drain_start = self.clock.now()
            self.drain_seconds = seconds
            self.wake()

    @property
    def is_draining(self) -> bool:
        """Whether the worker takes no new work. It may still have time for the rest."""
        return self.drain_seconds is not None

    def is_overdue(self, reserve: float = 0.0) -> bool:
        """Whether the time of the drain is over, except for `reserve` seconds."""
        if self.drain_seconds is None:
            return False
        return self.clock.now() >= self._drain_start + max(0.0, self.drain_seconds - reserve)

    def say_goodbye(self, peers: Iterable[Peer], reason: str) -> None:
        for peer in peers:
            self._listener.send(peer, Goodbye(reason))
