"""The transfers that a server offers, by id."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator

from paceline.runtime.transfer.messages import ID_BYTES
from paceline.runtime.transfer.transfer import Transfer
from paceline.runtime.wire.wakeup import Wakeup


class Registry:
    """Any thread may use it. It wakes the server's thread when a transfer changes."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._transfers: dict[bytes, tuple[Transfer, Callable[[], None]]] = {}
        """Transfer and its listener."""
        self._changed: deque[bytes] = deque()
        self._lock = threading.Lock()

    def add(self, transfer: Transfer) -> bytes:
        """Register a transfer under a new random id and return the id."""
        id = secrets.token_bytes(ID_BYTES)

        def on_change() -> None:
            self._changed.append(id)
            if len(self._changed) == 1:  # otherwise the server has a notice, and takes all changes at once
                self._wakeup.notify()

        with self._lock:
            self._transfers[id] = transfer, on_change
        transfer.subscribe(on_change)
        return id

    def get(self, id: bytes) -> Transfer | None:
        with self._lock:
            return self._transfers.get(id, (None,))[0]

    def remove(self, id: bytes) -> None:
        """An unknown id is no error."""
        with self._lock:
            found = self._transfers.pop(id, None)
        if found is not None:
            transfer, on_change = found
            transfer.unsubscribe(on_change)
            on_change()

    def clear(self) -> None:
        for id in list(self._transfers):
            self.remove(id)

    def pop_changed(self) -> Iterator[bytes]:
        """Ids of transfers that were filled, aborted or removed since the last call."""
        while self._changed:
            yield self._changed.popleft()
