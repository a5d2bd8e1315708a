"""The taking side of a worker."""

import threading
from collections.abc import Callable, Sequence

from paceline.runtime.transfer.channels.channels import Lines
from paceline.runtime.transfer.fetch import Fetch
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.wire.keys import Security


class Courier:
    """Takes parts of parcels, on the thread of whoever asks; any number of threads may."""

    def __init__(self, security: Security | None, kinds: Sequence[str] | None = None) -> None:
        """`security.own` is shown to depots; what theirs must be is on the ticket. With keys, tickets without are refused.
        `kinds` of transfer that may be used; None: see `pick_kinds`.
        """
        self._lines = Lines(security, kinds)

    def fetch(
        self,
        ticket: Ticket,
        wanted: Sequence[int],
        into: Callable[[int], memoryview],
        arrived: Callable[[int], None],
        cancelled: threading.Event | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Returns when every part in `wanted` has arrived and its checksums held. They are asked for in this order.

        `into` gives the place for a part, of its size and writable; it is called once a part, before its first byte. Bytes
        there mean nothing until `arrived` has been called with it. Both are called on this thread, and what they raise ends
        the fetch. Raises TransferFailed when the depot is gone, silent or refuses, a piece is corrupt, or not all has arrived
        after `timeout` seconds; TransferCancelled soon after `cancelled` is set.
        """
        if len(set(wanted)) < len(wanted) or any(not 0 <= index < len(ticket.sizes) for index in wanted):
            raise ValueError(f"wanted are parts of a parcel of {len(ticket.sizes)}, each once")
        line = self._lines.take(ticket)
        try:
            Fetch(line, ticket, wanted, into, arrived, cancelled, timeout).run()
        except BaseException:
            line.close()  # with what is still on its way
            raise
        self._lines.keep(ticket, line)

    @property
    def num_idle(self) -> int:
        """Lines kept for the next fetch."""
        return len(self._lines)

    def close(self) -> None:
        """Fetches under way go on to their end."""
        self._lines.close()
