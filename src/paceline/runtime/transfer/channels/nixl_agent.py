"""The part of NIXL that Paceline uses: reading memory that another process has registered."""

import ctypes
import logging
import mmap
import secrets
import threading
from importlib.util import find_spec
from typing import Any

from paceline.core.errors import MissingDependency
from paceline.runtime.transfer.transfer import ChannelUnavailable, TransferFailed

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
