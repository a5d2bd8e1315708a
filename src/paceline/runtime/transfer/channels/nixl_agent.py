"""NIXL, as little of it as is used here: reading memory that another process has registered."""

import ctypes
import logging
import mmap
import secrets
import threading
from importlib.util import find_spec
from typing import Any

from paceline.core.errors import MissingDependency
from paceline.runtime.transfer.errors import KindUnavailable, TransferFailed

logger = logging.getLogger(__name__)


def is_installed() -> bool:
    return find_spec("nixl") is not None


def import_nixl() -> Any:
    """The module. It sets up a log of its own on standard output, where answers go: only its errors are let through."""
    raises = logging.raiseExceptions
    try:
        import nixl._api as api
    except ImportError as error:
        if not is_installed():
            raise MissingDependency("nixl", "transfer by NIXL", "transfer") from None
        raise KindUnavailable(f"NIXL is installed and does not load: {error}") from None
    finally:
        logging.raiseExceptions = raises
    log = logging.getLogger("nixl")
    log.setLevel(logging.ERROR)
    log.handlers.clear()
    log.propagate = True
    return api


def start_agent(purpose: str, backend: str) -> Any:
    """An agent of NIXL's own. Raises MissingDependency without NIXL, KindUnavailable where it does not work."""
    api = import_nixl()
    name = f"paceline-{purpose}-{secrets.token_hex(8)}"
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[backend]))
    except Exception as error:  # its bindings raise classes of their own, without a common base
        raise KindUnavailable(f"NIXL does not start: {error}") from None
    if backend not in agent.backends:
        raise KindUnavailable(f"NIXL has no {backend} here")
    return agent


class Region:
    """Memory that NIXL knows: anonymous, so that a page of it is nobody else's."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.size = size


class NixlAgent:
    """Any thread may call it. Nothing in it waits, and nothing moves but inside a call: NIXL's own thread would keep a core
    busy for ever."""

    def __init__(self, purpose: str) -> None:
        """Raises KindUnavailable where NIXL finds no way to talk."""
        self._agent = start_agent(purpose, "UCX")
        self._lock = threading.Lock()
        self._registered: dict[int, tuple[Region, Any]] = {}
        self._met: dict[str, int] = {}

    def register(self, size: int) -> Region:
        """It stays in place until `release`."""
        region = Region(size)
        with self._lock:
            try:
                handle = self._agent.register_memory([(region.address, size, 0, "")], "DRAM", ["UCX"])
            except Exception as error:
                raise KindUnavailable(f"NIXL registers no memory: {error}") from None
            self._registered[region.address] = region, handle
        return region

    def release(self, region: Region) -> None:
        with self._lock:
            _, handle = self._registered.pop(region.address)
            self._agent.deregister_memory(handle, ["UCX"])

    def metadata(self) -> bytes:
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """The name of the agent whose metadata this is. As many `part` as `meet` end the acquaintance."""
        with self._lock:
            try:
                name = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise KindUnavailable(f"NIXL does not reach the depot: {error}") from None
            peer = name.decode() if isinstance(name, bytes) else str(name)
            self._met[peer] = self._met.get(peer, 0) + 1
            return peer

    def part(self, peer: str) -> None:
        with self._lock:
            self._met[peer] -= 1
            if not self._met[peer]:
                del self._met[peer]
                try:
                    self._agent.remove_remote_agent(peer)
                except Exception as error:
                    logger.debug("NIXL had lost %s already: %s", peer, error)

    def read(self, peer: str, remote: int, local: int, size: int) -> Any:
        """Begins to read `size` bytes at the address `remote` of `peer`. The handle is for `is_done` and `abort`."""
        with self._lock:
            try:
                here = self._agent.get_xfer_descs([(local, size, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(remote, size, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, peer, b"", ["UCX"])
                state = self._agent.transfer(handle)
            except Exception as error:
                raise TransferFailed(f"NIXL could not read from the depot: {error}") from None
        if state == "ERR":
            raise TransferFailed("NIXL could not read from the depot")
        return handle

    def is_done(self, handle: Any) -> bool:
        """Whether the bytes are there. Raises TransferFailed when they will not be."""
        with self._lock:
            try:
                state = self._agent.check_xfer_state(handle)
                if state == "DONE":
                    handle.release()
            except Exception as error:
                raise TransferFailed(f"NIXL lost the depot: {error}") from None
        if state == "ERR":
            raise TransferFailed("NIXL lost the depot")
        return bool(state == "DONE")

    def abort(self, handle: Any) -> None:
        """Bytes may still land a little later, for all that NIXL says: where they go must not be used again."""
        with self._lock:
            try:
                handle.release()
            except Exception as error:
                logger.debug("NIXL does not abort: %s", error)

    def progress(self) -> None:
        """What others read from here moves, on networks whose hardware does not do it alone."""
        with self._lock:
            try:
                self._agent.get_new_notifs(["UCX"])
            except Exception as error:
                logger.debug("NIXL made no progress: %s", error)
