"""The server side of transfers in a worker.

`ServeLoop` reads chunk requests and serves them round-robin.
"""

import logging
import threading
import time
from collections.abc import Sequence

import zmq

from paceline.transfer.fair_queue import ClientId, FairQueue, QueuedRequest
from paceline.transfer.memory import Registry
from paceline.transfer.nixl import StagingBuffer
from paceline.transfer.pool import pick_channels
from paceline.transfer.shared_memory import SharedMemoryListener
from paceline.transfer.socket import Socket, bind_server_socket
from paceline.transfer.transfer import ChannelUnavailable, Transfer, TransferFailed, chunk_range, num_chunks
from paceline.wire.codec import MalformedMessage
from paceline.wire.curve import Authenticator
from paceline.wire.keys import Security
from paceline.wire.transfer_messages import (
    TO_CLIENT,
    TO_SERVER,
    ChunkReply,
    ChunkRequest,
    KeepAlive,
    Refused,
    StagingRequest,
    ToClient,
    TransferHandle,
)
from paceline.wire.transport import Wakeup

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 1.0
"""Interval of keep-alive messages to clients that wait."""
PROGRESS_MS = 1
"""Interval of NIXL progress calls while clients may be reading. Without RDMA hardware reads move only in these calls."""
MAX_MESSAGES_PER_STEP, MAX_CHUNKS_PER_STEP = 256, 4
NOT_FOUND = "the transfer is not here: it was withdrawn, or never offered"


class ServeLoop:
    """Serves requests on the server's thread. A client that disconnects, does not read or sends invalid requests loses its own
    fetch and does not delay the remaining clients."""

    def __init__(
        self, socket: Socket, registry: Registry, shared_memory: SharedMemoryListener | None, has_nixl: bool
    ) -> None:
        self._socket = socket
        self._registry = registry
        self._shared_memory = shared_memory
        self._nixl_error = None if has_nixl else "NIXL is not enabled on this server"
        """Reason why there is no staging buffer, once known."""
        self._staging: StagingBuffer | None = None
        """Staging buffer, created for the first NIXL client because it takes a moment."""
        self._queue = FairQueue()
        self._is_blocked = False
        """Whether all ready requests wait for a slot of the staging buffer."""
        self._last_keep_alive = time.monotonic()

    @property
    def poll_timeout_ms(self) -> int:
        """Longest time to wait for messages before the next `step`."""
        if self._queue.has_ready and not self._is_blocked:
            return 0
        has_readers = self._staging is not None and self._staging.has_readers
        return PROGRESS_MS if has_readers else int(KEEP_ALIVE_SECONDS * 1e3)

    def step(self) -> None:
        """Process changed transfers and a bounded number of messages, and serve a few chunks."""
        self._process_changes()
        self._receive()
        self._is_blocked = sum(self._serve() for _ in range(MAX_CHUNKS_PER_STEP)) == 0
        if self._staging is not None and self._staging.has_readers:
            self._staging.progress()
        now = time.monotonic()
        if now - self._last_keep_alive >= KEEP_ALIVE_SECONDS:
            self._last_keep_alive = now
            self._send_keep_alives(now)

    def receive_local(self, shared_memory: SharedMemoryListener) -> None:
        """Process messages of shared memory clients."""
        for client, message in shared_memory.receive():
            if message is None:
                self._remove_client(client)
            else:
                self._process(client, message)

    def _process_changes(self) -> None:
        for id in self._registry.pop_changed():
            transfer = self._registry.get(id)
            if transfer is None:
                self._refuse(self._queue.remove_transfer(id), NOT_FOUND)
                continue
            for index in self._queue.awaited_parts(id):
                try:
                    if transfer.part(index) is not None:
                        self._queue.mark_ready(id, index)
                except TransferFailed as failed:
                    self._refuse(self._queue.remove_part(id, index), str(failed))

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES_PER_STEP):
            try:
                client, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._process(client, frames[0] if len(frames) == 1 else b"")

    def _process(self, client: ClientId, data: bytes) -> None:
        try:
            message = TO_SERVER.decode(data)
        except MalformedMessage:
            return
        if isinstance(message, ChunkRequest):
            self._enqueue(client, message)
        elif isinstance(message, StagingRequest):
            self._describe_staging(client)
        elif self._staging is not None:
            self._staging.release(client, message.slot)

    def _enqueue(self, client: ClientId, request: ChunkRequest) -> None:
        transfer = self._registry.get(request.id)
        if transfer is None:
            return self._refuse({client}, NOT_FOUND)
        if request.index >= len(transfer.sizes) or request.chunk >= num_chunks(transfer.sizes[request.index]):
            return self._refuse({client}, "there is no such part")
        if not self._queue.can_accept(client):
            return self._refuse({client}, "too many open requests")
        try:
            self._queue.add(QueuedRequest(client, request), transfer.part(request.index) is not None)
        except TransferFailed as failed:
            self._refuse({client}, str(failed))

    def _describe_staging(self, client: ClientId) -> None:
        try:
            staging = self._get_staging()
            self._send(client, staging.describe(client, time.monotonic()))
        except ChannelUnavailable as unavailable:
            self._refuse({client}, str(unavailable))

    def _get_staging(self) -> StagingBuffer:
        if self._staging is None:
            if self._nixl_error is not None:
                raise ChannelUnavailable(self._nixl_error)
            try:
                self._staging = StagingBuffer()
            except Exception as error:  # Any error of NIXL, while the remaining channels still work
                self._nixl_error = str(error)
                raise ChannelUnavailable(self._nixl_error) from None
        return self._staging

    def _serve(self) -> bool:
        """Serve one ready request. Returns False if no request is ready, or if the request has to wait for a staging slot."""
        queued = self._queue.pop()
        if queued is None:
            return False
        client, request = queued
        transfer = self._registry.get(request.id)
        part = None if transfer is None else transfer.part(request.index)
        if part is None:
            self._refuse({client}, NOT_FOUND)
            return True
        start, end = chunk_range(part.data.nbytes, request.chunk)
        data, crc = part.data[start:end], part.checksums[request.chunk]
        if request.slot < 0:
            self._send(client, ChunkReply(request.index, request.chunk, crc), data)
        elif isinstance(client, str):
            if self._shared_memory is not None and self._shared_memory.write(client, request.slot, data):
                self._send(client, ChunkReply(request.index, request.chunk, crc))
            else:
                self._refuse({client}, "there is no such slot")
        elif self._staging is None:
            self._refuse({client}, "there is no such slot")
        elif self._staging.can_stage(client):
            slot = self._staging.stage(client, data, time.monotonic())
            self._send(client, ChunkReply(request.index, request.chunk, crc, slot))
        else:
            self._queue.add(queued, True)
            return False
        return True

    def _send_keep_alives(self, now: float) -> None:
        waiting = self._queue.waiting_clients()
        if self._staging is not None:
            for client in self._staging.stalled_clients(now):
                self._refuse({client}, "a chunk was not read in time")
                self._remove_client(client)
            waiting |= self._staging.clients()
        for client in waiting:
            self._send(client, KeepAlive())

    def _refuse(self, clients: set[ClientId], reason: str) -> None:
        for client in clients:
            self._send(client, Refused(reason[:512]))

    def _send(self, client: ClientId, message: ToClient, data: memoryview | None = None) -> None:
        encoded = TO_CLIENT.encode(message)
        if isinstance(client, str):
            if data is not None or self._shared_memory is None or not self._shared_memory.send(client, encoded):
                self._remove_client(client)
            return
        try:
            self._socket.send_multipart([client, encoded], zmq.DONTWAIT | (0 if data is None else zmq.SNDMORE))
            if data is not None:
                self._socket.send(data, zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:  # EHOSTUNREACH: the client disconnected; EAGAIN: it does not read
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._remove_client(client)

    def _remove_client(self, client: ClientId) -> None:
        self._queue.remove_client(client)
        if isinstance(client, str) and self._shared_memory is not None:
            self._shared_memory.disconnect(client)
        if self._staging is not None:
            self._staging.release_all(client)


class TransferServer:
    """Serves transfers to every client that presents their handle, from its own thread."""

    def __init__(self, host: str, security: Security | None, channels: Sequence[str] | None = None) -> None:
        """`host` is the address to bind, which clients must be able to reach. Without `security` it must be a loopback address.
        The server accepts the allowed keys and its own key, because workers of one role share a key. `channels` lists the
        channels to offer in addition to sockets, which every client uses for its requests. If it is None, `pick_channels`
        chooses them.
        """
        channels = pick_channels(channels, security)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = None
        if security is not None:
            allowed = security.allowed | {security.own.public}
            self._authenticator = Authenticator(self._context, allowed)
        self._shared_memory = SharedMemoryListener() if "memory" in channels else None
        try:
            self._socket = bind_server_socket(self._context, host, security)
        except BaseException:
            self._close_context()
            raise
        self.addresses = {"socket": self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")}
        if self._shared_memory is not None:
            self.addresses["memory"] = self._shared_memory.address
        if "nixl" in channels:
            self.addresses["nixl"] = "UCX"
        self._key = "" if security is None else security.own.public
        self._wakeup = Wakeup()
        self._registry = Registry(self._wakeup)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-transfer-server", daemon=True)
        self._thread.start()

    def offer(self, transfer: Transfer) -> TransferHandle:
        """The handle is valid until `withdraw`, for any number of clients."""
        return TransferHandle(self._registry.add(transfer), self.addresses, list(transfer.sizes), self._key)

    def withdraw(self, handle: TransferHandle) -> None:
        """Stop serving a transfer; open requests for it are refused. Its bytes may change from now on: a chunk that is still
        being sent then fails its checksum. A second call is no error."""
        self._registry.remove(handle.id)

    def close(self) -> None:
        """Withdraw every transfer and stop. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._wakeup.notify()
            self._thread.join()
            self._registry.clear()

    def _run(self) -> None:
        loop = ServeLoop(self._socket, self._registry, self._shared_memory, "nixl" in self.addresses)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        if self._shared_memory is not None:
            poller.register(self._shared_memory.descriptor, zmq.POLLIN)
        try:
            while not self._is_closed:
                ready = dict(poller.poll(loop.poll_timeout_ms))
                if self._wakeup.fd in ready:
                    self._wakeup.clear()
                if self._shared_memory is not None and self._shared_memory.descriptor in ready:
                    loop.receive_local(self._shared_memory)
                loop.step()
        except Exception:
            logger.exception("the transfer server stopped: its transfers can no longer be fetched; restart the worker")
        finally:
            self._socket.close(0)
            self._wakeup.close()
            self._close_context()

    def _close_context(self) -> None:
        if self._shared_memory is not None:
            self._shared_memory.close()
        if self._authenticator:
            self._authenticator.close()
        self._context.term()
