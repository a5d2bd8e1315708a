"""The channel NIXL: the server copies chunks to a staging buffer, and clients read them from there.

The parts themselves are not registered with NIXL. There are thousands of them, and a read in progress while its memory is freed
would crash the server. The staging buffer is registered once and stays at its address.

`NixlAgent` is the part of NIXL that Paceline uses: reading memory that another process has registered.
"""

import ctypes
import logging
import mmap
import secrets
import threading
import time
from importlib.util import find_spec
from typing import Any, NamedTuple

from paceline.core.errors import MissingDependency
from paceline.kernels.cpu.checksums import copy_crc32, crc32
from paceline.transfer.fair_queue import ClientId
from paceline.transfer.socket import ServerConnection
from paceline.transfer.transfer import (
    CHUNK_BYTES,
    MAX_INFLIGHT_CHUNKS,
    ChannelUnavailable,
    ReceivedChunk,
    TransferFailed,
    require_keep_alive,
)
from paceline.wire.transfer_messages import (
    ChunkReply,
    ChunkRequest,
    KeepAlive,
    SlotReleased,
    StagingReply,
    StagingRequest,
)

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    return find_spec("nixl") is not None


def import_nixl() -> Any:
    """The module `nixl._api`. Its own log handler writes to standard output, where generated text goes: this removes the
    handler and keeps its errors."""
    raises = logging.raiseExceptions
    try:
        import nixl._api as api
    except ImportError as error:
        if not is_installed():
            raise MissingDependency("nixl", "transfer by NIXL", "transfer") from None
        raise ChannelUnavailable(f"NIXL is installed and does not load: {error}") from None
    finally:
        logging.raiseExceptions = raises
    log = logging.getLogger("nixl")
    log.setLevel(logging.ERROR)
    log.handlers.clear()
    log.propagate = True
    return api


def start_agent(purpose: str, backend: str) -> Any:
    """A `nixl_agent`. Raises MissingDependency without NIXL, ChannelUnavailable if it does not work."""
    api = import_nixl()
    name = f"paceline-{purpose}-{secrets.token_hex(8)}"
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[backend]))
    except Exception as error:  # the bindings' exceptions have no common base class
        raise ChannelUnavailable(f"NIXL does not start: {error}") from None
    if backend not in agent.backends:
        raise ChannelUnavailable(f"NIXL has no {backend} backend on this machine")
    return agent


class Region:
    """Memory registered with NIXL. An anonymous mapping, so that it shares no page with other data."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.size = size


class NixlAgent:
    """Any thread may call it. No call waits, and data moves only inside calls: NIXL's own progress thread, which would keep a
    core busy, is off."""

    def __init__(self, purpose: str) -> None:
        """Raises ChannelUnavailable if NIXL finds no usable network."""
        self._agent = start_agent(purpose, "UCX")
        self._lock = threading.Lock()
        self._registered: dict[int, tuple[Region, Any]] = {}
        self._peer_counts: dict[str, int] = {}

    def register(self, size: int) -> Region:
        """Allocate and register memory. It stays at its address until `release`."""
        region = Region(size)
        with self._lock:
            try:
                handle = self._agent.register_memory([(region.address, size, 0, "")], "DRAM", ["UCX"])
            except Exception as error:
                raise ChannelUnavailable(f"NIXL could not register memory: {error}") from None
            self._registered[region.address] = region, handle
        return region

    def release(self, region: Region) -> None:
        with self._lock:
            _, handle = self._registered.pop(region.address)
            self._agent.deregister_memory(handle, ["UCX"])

    def metadata(self) -> bytes:
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Connect to the agent with this metadata and return its name. Calls are counted: each needs one `remove_peer`."""
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise ChannelUnavailable(f"NIXL does not reach the server: {error}") from None
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._peer_counts[peer] = self._peer_counts.get(peer, 0) + 1
            return peer

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            self._peer_counts[peer] -= 1
            if not self._peer_counts[peer]:
                del self._peer_counts[peer]
                try:
                    self._agent.remove_remote_agent(peer)
                except Exception as error:
                    logger.debug("NIXL had lost %s already: %s", peer, error)

    def read(self, peer: str, remote: int, local: int, size: int) -> Any:
        """Start to read `size` bytes at address `remote` of `peer`. Returns a handle for `is_done` and `abort`."""
        with self._lock:
            try:
                local_descs = self._agent.get_xfer_descs([(local, size, 0)], "DRAM")
                remote_descs = self._agent.get_xfer_descs([(remote, size, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", local_descs, remote_descs, peer, b"", ["UCX"])
                state = self._agent.transfer(handle)
            except Exception as error:
                raise TransferFailed(f"NIXL could not read from the server: {error}") from None
        if state == "ERR":
            raise TransferFailed("NIXL could not read from the server")
        return handle

    def is_done(self, handle: Any) -> bool:
        """Whether the read is complete. Raises TransferFailed if it failed."""
        with self._lock:
            try:
                state = self._agent.check_xfer_state(handle)
                if state == "DONE":
                    handle.release()
            except Exception as error:
                raise TransferFailed(f"NIXL lost the server: {error}") from None
        if state == "ERR":
            raise TransferFailed("NIXL lost the server")
        return bool(state == "DONE")

    def abort(self, handle: Any) -> None:
        """Abort a read. Its bytes may still arrive later: never reuse the destination."""
        with self._lock:
            try:
                handle.release()
            except Exception as error:
                logger.debug("NIXL could not abort a read: %s", error)

    def progress(self) -> None:
        """Drive reads by peers, on networks without hardware that does so."""
        with self._lock:
            try:
                self._agent.get_new_notifs(["UCX"])
            except Exception as error:
                logger.debug("NIXL made no progress: %s", error)


NUM_SLOTS = 4 * MAX_INFLIGHT_CHUNKS
PROBE = memoryview(b"paceline" * 8)
"""Bytes that a client reads first, to learn whether NIXL reaches the server."""
READ_TIMEOUT_SECONDS = 10.0
"""Time for a client to read a staged chunk before the server drops it."""
CONNECT_SECONDS = 5.0
"""Time to connect. The first client waits for the server to start NIXL."""
CLOSE_SECONDS = 1.0
"""Time for reads in progress to finish when a channel is closed."""
POLL_SECONDS = 50e-6


class _Staged(NamedTuple):
    client: ClientId
    since: float


class StagingBuffer:
    """Registered memory with slots for chunks. Used by the server's thread only."""

    def __init__(self) -> None:
        """Raises ChannelUnavailable if NIXL does not work."""
        self._agent = NixlAgent("server")
        self._region = self._agent.register(NUM_SLOTS * CHUNK_BYTES)
        self._free_slots = list(range(NUM_SLOTS))
        self._staged: dict[int, _Staged] = {}
        """Used slots."""
        self._metadata = self._agent.metadata()

    @property
    def has_readers(self) -> bool:
        """Whether a client may be reading; `progress` must then be called often."""
        return bool(self._staged)

    def can_stage(self, client: ClientId) -> bool:
        """Whether a slot is free and the client uses fewer than it has destination buffers for."""
        num_used = sum(staged.client == client for staged in self._staged.values())
        return bool(self._free_slots) and num_used < MAX_INFLIGHT_CHUNKS

    def stage(self, client: ClientId, data: memoryview, now: float) -> int:
        """Copy `data` to a slot and return the slot. It is the client's until it is released."""
        slot = self._free_slots.pop()
        start = slot * CHUNK_BYTES
        copy_crc32(data, self._region.view[start : start + data.nbytes])
        self._staged[slot] = _Staged(client, now)
        return slot

    def describe(self, client: ClientId, now: float) -> StagingReply:
        """Stage the probe and return where the buffer is. Raises ChannelUnavailable if no slot is free."""
        if not self.can_stage(client):
            raise ChannelUnavailable("the staging buffer is full: too many clients read from it")
        return StagingReply(self._metadata, self._region.address, self.stage(client, PROBE, now))

    def release(self, client: ClientId, slot: int) -> None:
        """Free a slot. One that is not the client's is ignored."""
        if slot in self._staged and self._staged[slot].client == client:
            del self._staged[slot]
            self._free_slots.append(slot)

    def release_all(self, client: ClientId) -> None:
        for slot in list(self._staged):
            self.release(client, slot)

    def clients(self) -> set[ClientId]:
        return {staged.client for staged in self._staged.values()}

    def stalled_clients(self, now: float) -> set[ClientId]:
        """Clients that did not read a staged chunk in time."""
        return {staged.client for staged in self._staged.values() if now - staged.since >= READ_TIMEOUT_SECONDS}

    def progress(self) -> None:
        self._agent.progress()


class _Read(NamedTuple):
    """A read in progress."""

    reply: ChunkReply
    slot: int
    size: int
    handle: Any


class NixlChannel:
    """The server replies with a staging slot; this client reads it into a slot of its own region and releases it."""

    def __init__(self, agent: NixlAgent, connection: ServerConnection) -> None:
        """Raises ChannelUnavailable if NIXL does not reach the server."""
        self._agent = agent
        self._connection = connection
        self._free_slots = list(range(MAX_INFLIGHT_CHUNKS))
        self._sizes: dict[tuple[int, int], int] = {}
        """Bytes of requested chunks, by (part, chunk)."""
        self._reads: list[_Read] = []
        self._slot_in_use: int | None = None
        """Slot of the last received chunk, which the caller may still read."""
        self._peer: str | None = None
        self._region: Region | None = None
        self._staging_address = 0
        try:
            self._connect(time.monotonic() + CONNECT_SECONDS)
        except (ChannelUnavailable, TransferFailed) as failed:
            self.close()
            raise ChannelUnavailable(str(failed)) from None

    def request(self, id: bytes, index: int, chunk: int, size: int) -> None:
        self._free_last_slot()
        self._sizes[index, chunk] = size
        self._connection.send(ChunkRequest(id, index, chunk, slot=0))

    def receive(self, seconds: float) -> ReceivedChunk | KeepAlive | None:
        self._free_last_slot()
        deadline = time.monotonic() + seconds
        while True:
            for read in self._reads:
                if read.handle is None or self._agent.is_done(read.handle):
                    return self._finish(read)
            received = self._connection.receive(0.0 if self._reads else max(0.0, deadline - time.monotonic()))
            if received is not None:
                reply, _ = received
                if not isinstance(reply, ChunkReply):
                    return require_keep_alive(reply)
                self._start_read(reply)
            elif time.monotonic() >= deadline:
                return None
            elif self._reads:
                time.sleep(POLL_SECONDS)

    def is_broken(self) -> bool:
        return self._connection.is_broken()

    def close(self) -> None:
        self._connection.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            while self._reads and time.monotonic() < deadline:
                self._reads = [read for read in self._reads if read.handle and not self._agent.is_done(read.handle)]
                time.sleep(POLL_SECONDS)
        except TransferFailed:
            pass
        for read in self._reads:
            self._agent.abort(read.handle)
        if self._peer is not None:
            self._agent.remove_peer(self._peer)
        # Bytes of an aborted read may still arrive in the region: it then stays allocated and is never used again
        if self._region is not None and not self._reads:
            self._agent.release(self._region)

    def _connect(self, deadline: float) -> None:
        """Locate the staging buffer and read the probe: a reachable server does not mean that NIXL reaches it."""
        self._connection.send(StagingRequest())
        staging: object = None
        while not isinstance(staging, StagingReply):
            received = self._connection.receive(max(0.0, deadline - time.monotonic()))
            if received is None:
                raise ChannelUnavailable("the server does not answer")
            staging, _ = received
        self._staging_address = staging.address
        self._peer = self._agent.add_peer(staging.metadata)
        self._region = self._agent.register(MAX_INFLIGHT_CHUNKS * CHUNK_BYTES)
        self._sizes[0, 0] = PROBE.nbytes
        self._start_read(ChunkReply(0, 0, crc32(PROBE), staging.slot))
        probe = self.receive(deadline - time.monotonic())
        while isinstance(probe, KeepAlive):
            probe = self.receive(deadline - time.monotonic())
        if probe is None or probe.data != PROBE:
            raise ChannelUnavailable("NIXL could not read from the server")

    def _start_read(self, reply: ChunkReply) -> None:
        size = self._sizes.pop((reply.index, reply.chunk), None)
        if size is None or reply.slot < 0:
            raise TransferFailed("the server sent a chunk that was not requested")
        assert self._region is not None
        assert self._peer is not None
        slot = self._free_slots.pop()
        remote, local = self._staging_address + reply.slot * CHUNK_BYTES, self._region.address + slot * CHUNK_BYTES
        handle = self._agent.read(self._peer, remote, local, size) if size else None
        self._reads.append(_Read(reply, slot, size, handle))

    def _finish(self, read: _Read) -> ReceivedChunk:
        assert self._region is not None
        self._reads.remove(read)
        reply, slot, size, _ = read
        self._connection.send(SlotReleased(reply.slot))
        self._slot_in_use = slot
        start = slot * CHUNK_BYTES
        return ReceivedChunk(reply.index, reply.chunk, reply.checksum, self._region.view[start : start + size])

    def _free_last_slot(self) -> None:
        if self._slot_in_use is not None:
            self._free_slots.append(self._slot_in_use)
            self._slot_in_use = None
