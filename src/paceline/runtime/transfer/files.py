"""Between memory and files: many ranges of a file at once, by NIXL or by plain reads and writes."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from paceline.runtime.transfer.channels import nixl_agent
from paceline.runtime.transfer.errors import KindUnavailable

GLANCE_SECONDS = 50e-6


class Range(NamedTuple):
    offset: int
    """In the file."""
    data: memoryview
    """In memory: contiguous bytes, writable ones to read into."""


class Files(Protocol):
    """Used by one thread at a time. Both return when all is done, and raise OSError otherwise: then any of it may be."""

    def read(self, file: int, ranges: Sequence[Range]) -> None:
        """From an open file's descriptor. A range that reaches past its end is an error, and nothing is read."""

    def write(self, file: int, ranges: Sequence[Range]) -> None:
        """To an open file's descriptor. Not yet on the disk: that takes an `os.fsync`."""


def open_files() -> Files:
    """By NIXL where it is installed and works, otherwise plainly."""
    if nixl_agent.is_installed():
        try:
            return NixlFiles()
        except KindUnavailable:
            pass
    return PlainFiles()


class PlainFiles:
    def read(self, file: int, ranges: Sequence[Range]) -> None:
        _check_end(file, ranges)
        for offset, data in ranges:
            done = 0
            while done < data.nbytes:
                count = os.preadv(file, [data[done:]], offset + done)
                if not count:
                    raise OSError(f"the file ends at {offset + done}, within what was to be read")
                done += count

    def write(self, file: int, ranges: Sequence[Range]) -> None:
        for offset, data in ranges:
            done = 0
            while done < data.nbytes:
                done += os.pwrite(file, data[done:], offset + done)


class NixlFiles:
    """NIXL's POSIX backend: all ranges are under way at once."""

    def __init__(self) -> None:
        """Raises MissingDependency without NIXL, KindUnavailable where it does not work."""
        self._agent = nixl_agent.start_agent("files", "POSIX")

    def read(self, file: int, ranges: Sequence[Range]) -> None:
        _check_end(file, ranges)
        self._move("READ", file, ranges)

    def write(self, file: int, ranges: Sequence[Range]) -> None:
        self._move("WRITE", file, ranges)

    def _move(self, operation: str, file: int, ranges: Sequence[Range]) -> None:
        held = [(offset, np.frombuffer(data, np.uint8)) for offset, data in ranges if data.nbytes]
        if not held:
            return
        agent, only = self._agent, ["POSIX"]
        memory = [(array.ctypes.data, array.nbytes, 0) for _, array in held]
        places = [(offset, array.nbytes, file) for offset, array in held]
        end = max(offset + size for offset, size, _ in places)
        try:
            registered = agent.register_memory([(*one, "") for one in memory], "DRAM", only)
            opened = agent.register_memory([(0, end, file, "")], "FILE", only)
            here, there = agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(places, "FILE")
            handle = agent.initialize_xfer(operation, here, there, agent.name, b"", only)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(GLANCE_SECONDS)
                state = agent.check_xfer_state(handle)
            handle.release()
            agent.deregister_memory(opened, only)
            agent.deregister_memory(registered, only)
        except Exception as error:  # its bindings raise classes of their own, without a common base
            raise OSError(f"NIXL could not {operation.lower()}: {error}") from None
        if state != "DONE":
            raise OSError(f"NIXL could not {operation.lower()} {len(held)} ranges")


def _check_end(file: int, ranges: Sequence[Range]) -> None:
    size = os.fstat(file).st_size
    for offset, data in ranges:
        if offset < 0 or offset + data.nbytes > size:
            raise OSError(f"bytes {offset} to {offset + data.nbytes} are not in a file of {size}")
