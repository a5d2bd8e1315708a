"""The wait for drafts before a pass of the target: as long as the missing drafts are worth it."""

from paceline.cluster.pairing.pairing import is_worth_waiting
from paceline.core.clock import Clock
from paceline.runtime.draft_pool.arms import PoolDrafts
from paceline.runtime.draft_pool.connections import DraftConnections
from paceline.runtime.draft_pool.inbox import PoolInbox
from paceline.runtime.draft_pool.sequence import PoolSequence
from paceline.runtime.wire.messages import FromDraft
from paceline.runtime.wire.transport import Connection

IDLE_WAIT_SECONDS = 0.01
"""Time that an idle target waits for the answer to a ping, about every two seconds."""


class DraftWait:
    """Waits for drafts, and now and then for the answer to a ping, so that the measured round trip is exact."""

    def __init__(self, inbox: PoolInbox, connections: DraftConnections, pool_drafts: PoolDrafts, clock: Clock) -> None:
        self._inbox, self._connections, self._pool_drafts, self._clock = inbox, connections, pool_drafts, clock

    def wait(self, requested: list[PoolSequence], deadline: float) -> None:
        """Wait until every draft has arrived, or the missing ones are not worth the wait."""
        while True:
            now = self._clock.now()
            missing = [sequence for sequence in requested if sequence.chain is None and sequence.requested]
            until = self._wait_until(len(requested) - len(missing), missing, now, deadline)
            waiting = {sequence.connection.transport for sequence in missing if sequence.connection is not None}
            if until <= now:  # not for the drafts, but now and then to measure round trips
                waiting = set(self._awaited_pings(now) if requested else ())
            if now >= deadline or not waiting:
                break
            self._inbox.wait(waiting, (until if until > now else deadline) - now)

    def wait_idle(self, now: float) -> None:
        """Wait a moment for pings whose answer should be waited for."""
        awaited = self._awaited_pings(now)
        if awaited:
            self._inbox.wait(awaited, IDLE_WAIT_SECONDS)

    def _awaited_pings(self, now: float) -> list[Connection[FromDraft]]:
        """Transports of the connections whose answer to a ping should be waited for."""
        return [connection.transport for connection in self._connections.all if connection.needs_awaited_ping(now)]

    def _wait_until(self, num_ready: int, missing: list[PoolSequence], now: float, deadline: float) -> float:
        """Time until which to wait for the missing drafts. It is not after `now` if they are not worth the wait."""
        expected = [at for sequence in missing if (at := sequence.expected_at(now, deadline)) > now]
        if not expected:
            return now
        soonest = min(expected)
        num_soonest = sum(at <= soonest + 0.001 for at in expected)
        gains = [
            self._pool_drafts.of(sequence.connection).statistics.gain
            for sequence in missing
            if sequence.connection is not None
        ]
        gain, step = sum(gains) / len(gains), self._pool_drafts.current.statistics.step_seconds
        if step is None or is_worth_waiting(num_ready, num_soonest, gain, soonest - now, step):
            return min(soonest, deadline)
        return now
