"""Reads and writes of many ranges of a file at once, by NIXL or by system calls."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from paceline.runtime.transfer.channels import nixl_agent
from paceline.runtime.transfer.transfer import ChannelUnavailable

POLL_SECONDS = 50e-6


class Range(NamedTuple):
    offset: int
    """Offset in the file."""
    data: memoryview
    """Contiguous bytes in memory; writable for a read."""


class Files(Protocol):
    """Used by one thread at a time. Both methods return when all ranges are done. After an OSError any of them may be done."""

    def read(self, file: int, ranges: Sequence[Range]) -> None:
        """Read from an open descriptor. A range past the end of the file raises OSError before anything is read."""

    def write(self, file: int, ranges: Sequence[Range]) -> None:
        """Write to an open descriptor. Durable only after `os.fsync`."""


def open_files() -> Files:
    """`NixlFiles` if NIXL is installed and works, otherwise `PlainFiles`."""
    if nixl_agent.is_installed():
        try:
            return NixlFiles()
        except ChannelUnavailable:
            pass
    return PlainFiles()


class PlainFiles:
    """System calls, one range after the other."""

    def read(self, file: int, ranges: Sequence[Range]) -> None:
        _check_end(file, ranges)
        for offset, data in ranges:
            done = 0
            while done < data.nbytes:
                count = os.preadv(file, [data[done:]], offset + done)
                if not count:
                    raise OSError(f"the file ends at {offset + done}, inside a range to read")
                done += count

    def write(self, file: int, ranges: Sequence[Range]) -> None:
        for offset, data in ranges:
            done = 0
            while done < data.nbytes:
                done += os.pwrite(file, data[done:], offset + done)


class NixlFiles:
    """NIXL's POSIX backend: all ranges in flight at once."""

    def __init__(self) -> None:
        """Raises MissingDependency without NIXL, ChannelUnavailable if it does not work."""
        self._agent = nixl_agent.start_agent("files", "POSIX")

    def read(self, file: int, ranges: Sequence[Range]) -> None:
        _check_end(file, ranges)
        self._run("READ", file, ranges)

    def write(self, file: int, ranges: Sequence[Range]) -> None:
        self._run("WRITE", file, ranges)

    def _run(self, operation: str, file: int, ranges: Sequence[Range]) -> None:
        arrays = [(offset, np.frombuffer(data, np.uint8)) for offset, data in ranges if data.nbytes]
        if not arrays:
            return
        agent, backends = self._agent, ["POSIX"]
        memory = [(array.ctypes.data, array.nbytes, 0) for _, array in arrays]
        extents = [(offset, array.nbytes, file) for offset, array in arrays]
        end = max(offset + size for offset, size, _ in extents)
        try:
            memory_handle = agent.register_memory([(*one, "") for one in memory], "DRAM", backends)
            file_handle = agent.register_memory([(0, end, file, "")], "FILE", backends)
            local, remote = agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(extents, "FILE")
            handle = agent.initialize_xfer(operation, local, remote, agent.name, b"", backends)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_SECONDS)
                state = agent.check_xfer_state(handle)
            handle.release()
            agent.deregister_memory(file_handle, backends)
            agent.deregister_memory(memory_handle, backends)
        except Exception as error:  # the bindings' exceptions have no common base class
            raise OSError(f"NIXL could not {operation.lower()}: {error}") from None
        if state != "DONE":
            raise OSError(f"NIXL could not {operation.lower()} {len(arrays)} ranges")


def _check_end(file: int, ranges: Sequence[Range]) -> None:
    size = os.fstat(file).st_size
    for offset, data in ranges:
        if offset < 0 or offset + data.nbytes > size:
            raise OSError(f"bytes {offset} to {offset + data.nbytes} are not in a file of {size}")
