"""The parcels of a depot, by the secret on their tickets."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator

from paceline.runtime.transfer.handle import ID_BYTES
from paceline.runtime.transfer.transfer import Parcel
from paceline.runtime.wire.wakeup import Bell


class Stock:
    """Any thread may use it. The bell is rung when there is something new about a parcel."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._parcels: dict[bytes, tuple[Parcel, Callable[[], None]]] = {}
        self._changed: deque[bytes] = deque()
        self._lock = threading.Lock()

    def put(self, parcel: Parcel) -> bytes:
        id = secrets.token_bytes(ID_BYTES)

        def changed() -> None:
            self._changed.append(id)
            self._bell.ring()

        with self._lock:
            self._parcels[id] = parcel, changed
        parcel.watch(changed)
        return id

    def get(self, id: bytes) -> Parcel | None:
        with self._lock:
            return self._parcels.get(id, (None,))[0]

    def remove(self, id: bytes) -> None:
        with self._lock:
            found = self._parcels.pop(id, None)
        if found is not None:
            parcel, changed = found
            parcel.unwatch(changed)
            changed()

    def clear(self) -> None:
        for id in list(self._parcels):
            self.remove(id)

    def changes(self) -> Iterator[bytes]:
        """Parcels that were filled, abandoned or removed since they were last asked about."""
        while self._changed:
            yield self._changed.popleft()
