"""Chunk requests of all clients, served round-robin so that a large fetch does not delay small ones."""

from collections import deque
from typing import NamedTuple, TypeAlias

from paceline.wire.transfer_messages import ChunkRequest
from paceline.wire.transport import Peer

ClientId: TypeAlias = Peer | str
"""Routing id of a ZeroMQ client, or name of a shared memory client."""

MAX_REQUESTS = 64
"""Open requests of one client."""
MAX_WAITING = 1 << 16
"""Requests of all clients that wait for a part to become ready."""


class QueuedRequest(NamedTuple):
    client: ClientId
    request: ChunkRequest


class FairQueue:
    """Requests whose part is ready, round-robin by client, and requests that wait for their part."""

    def __init__(self) -> None:
        self._ready: dict[ClientId, deque[ChunkRequest]] = {}
        """Ready requests in round-robin order: a served client moves to the end."""
        self._waiting: dict[bytes, dict[int, list[QueuedRequest]]] = {}
        """Waiting requests by transfer and part."""
        self._counts: dict[ClientId, int] = {}
        self._num_waiting = 0

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def can_accept(self, client: ClientId) -> bool:
        return self._counts.get(client, 0) < MAX_REQUESTS and self._num_waiting < MAX_WAITING

    def add(self, queued: QueuedRequest, is_ready: bool) -> None:
        """Append a request; with `is_ready` it can be served at once."""
        self._counts[queued.client] = self._counts.get(queued.client, 0) + 1
        if is_ready:
            self._ready.setdefault(queued.client, deque()).append(queued.request)
        else:
            self._waiting.setdefault(queued.request.id, {}).setdefault(queued.request.index, []).append(queued)
            self._num_waiting += 1

    def mark_ready(self, id: bytes, index: int) -> None:
        """Move the requests that wait for this part to the ready queue."""
        for client, request in self._remove_waiting(id, index):
            self._ready.setdefault(client, deque()).append(request)

    def pop(self) -> QueuedRequest | None:
        """The next ready request, or None."""
        client = next(iter(self._ready), None)
        if client is None:
            return None
        requests = self._ready.pop(client)
        request = requests.popleft()
        if requests:
            self._ready[client] = requests
        self._decrement(client, 1)
        return QueuedRequest(client, request)

    def awaited_parts(self, id: bytes) -> list[int]:
        """The parts of a transfer that requests wait for."""
        return list(self._waiting.get(id, ()))

    def remove_part(self, id: bytes, index: int) -> set[ClientId]:
        """Remove the requests that wait for this part and return their clients."""
        removed = self._remove_waiting(id, index)
        for client, _ in removed:
            self._decrement(client, 1)
        return {client for client, _ in removed}

    def remove_transfer(self, id: bytes) -> set[ClientId]:
        """Remove all requests for this transfer and return their clients."""
        clients: set[ClientId] = set()
        for index in self.awaited_parts(id):
            clients |= self.remove_part(id, index)
        for client, requests in list(self._ready.items()):
            kept = deque(request for request in requests if request.id != id)
            if len(kept) < len(requests):
                clients.add(client)
                self._decrement(client, len(requests) - len(kept))
                self._ready[client] = kept
                if not kept:
                    del self._ready[client]
        return clients

    def waiting_clients(self) -> set[ClientId]:
        return {client for parts in self._waiting.values() for queued in parts.values() for client, _ in queued}

    def remove_client(self, client: ClientId) -> None:
        """Remove all requests of a disconnected client."""
        self._ready.pop(client, None)
        for id, parts in list(self._waiting.items()):
            for index, queued in list(parts.items()):
                kept = [request for request in queued if request.client != client]
                if len(kept) < len(queued):
                    self._remove_waiting(id, index)
                    for request in kept:
                        self._waiting.setdefault(id, {}).setdefault(index, []).append(request)
                    self._num_waiting += len(kept)
        self._counts.pop(client, None)

    def _remove_waiting(self, id: bytes, index: int) -> list[QueuedRequest]:
        parts = self._waiting.get(id, {})
        queued = parts.pop(index, [])
        if not parts:
            self._waiting.pop(id, None)
        self._num_waiting -= len(queued)
        return queued

    def _decrement(self, client: ClientId, count: int) -> None:
        left = self._counts[client] - count
        if left:
            self._counts[client] = left
        else:
            del self._counts[client]
