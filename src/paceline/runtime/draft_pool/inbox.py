"""Messages of draft workers: received on the engine's thread and passed to the connection or the sequence they are for."""

from collections.abc import Iterable

from paceline.core.clock import Clock
from paceline.runtime.draft_pool.connection import DraftConnection
from paceline.runtime.draft_pool.connections import DraftConnections
from paceline.runtime.draft_pool.sequences import PoolSequences
from paceline.runtime.wire.messages import Branches, Busy, Drafts, Error, ErrorCode, FromDraft, Goodbye
from paceline.runtime.wire.transport import Connection, wait_any


class PoolInbox:
    """Receives from all connections. Only `wait` blocks."""

    def __init__(self, connections: DraftConnections, sequences: PoolSequences, clock: Clock) -> None:
        self._connections, self._sequences, self._clock = connections, sequences, clock

    def receive(self, was_awaited: bool = False) -> float:
        """Handle all messages that have arrived and return the time. `was_awaited` says that the caller has waited for them."""
        now = self._clock.now()
        for connection in self._connections.all:
            while (message := connection.receive(now, was_awaited)) is not None:
                self._handle(connection, message, now, was_awaited)
        return now

    def maintain(self) -> float:
        """Receive messages, maintain the connections and return the time."""
        now = self.receive()
        for connection in self._connections.all:
            connection.maintain(now)
        return now

    def wait(self, transports: Iterable[Connection[FromDraft]], seconds: float) -> None:
        """Wait until one of them has a message, at most `seconds`, and handle what has arrived."""
        wait_any(list(transports), seconds)
        self.receive(was_awaited=True)

    def _handle(self, connection: DraftConnection, message: FromDraft, now: float, was_awaited: bool) -> None:
        if isinstance(message, Drafts):
            for draft in message.drafts:
                if (sequence := self._sequences.open_at(connection, draft.sequence)) is not None:
                    sequence.receive_draft(draft, now, was_awaited)
                else:
                    connection.counters.late += 1
        elif isinstance(message, Branches):
            for record in message.sequences if message.epoch == connection.epoch else ():
                if (sequence := self._sequences.open_at(connection, record.sequence)) is not None:
                    sequence.receive_branches(record)
        elif isinstance(message, Busy):
            connection.mark_busy(now + message.retry_ms * 1e-3)
            self._sequences.unassign(connection, message.sequences)
        elif isinstance(message, Goodbye):
            connection.lose(now, "it is stopping")
        elif isinstance(message, Error):
            self._handle_error(connection, message, now)

    def _handle_error(self, connection: DraftConnection, error: Error, now: float) -> None:
        if error.code in (ErrorCode.NO_HELLO, ErrorCode.EPOCH):
            connection.repeat_hello(now)
        elif error.code in (ErrorCode.VERSION, ErrorCode.TOKENIZER):
            connection.refuse(now, error.message)
        else:
            self._sequences.unassign(connection, error.sequences)
