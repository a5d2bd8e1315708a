"""What one worker gives to others: parts that become ready over time."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.runtime.transfer.errors import TransferFailed
from paceline.runtime.transfer.handle import MAX_PART_BYTES, MAX_PARTS
from paceline.runtime.transfer.pieces import checksum, num_pieces, piece_range


@dataclass(frozen=True, slots=True)
class Part:
    data: memoryview
    checksums: tuple[int, ...]
    """One a piece, taken when the part was filled."""


class Parcel:
    """Parts of known sizes, filled in any order by any thread, each once. It keeps what it is filled with by reference:
    the bytes must stay as they are until the parcel is withdrawn. Bytes that change nevertheless arrive as corrupt.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if not 0 < len(sizes) <= MAX_PARTS or any(not 0 <= size <= MAX_PART_BYTES for size in sizes):
            raise ValueError(f"a parcel has 1 to {MAX_PARTS} parts of 0 to {MAX_PART_BYTES} bytes")
        self.sizes = tuple(sizes)
        self.reason: str | None = None
        """Why it was abandoned."""
        self._parts: dict[int, Part] = {}
        self._watchers: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def fill(self, index: int, data: memoryview) -> None:
        """Part `index` is `data`, C-contiguous."""
        if not data.c_contiguous:
            raise ValueError(f"part {index} is not C-contiguous: make it so before it is filled")
        flat = data.cast("B") if data.nbytes else memoryview(b"")
        size = self.sizes[index]
        if flat.nbytes != size:
            raise ValueError(f"part {index} was announced with {size} bytes and is filled with {flat.nbytes}")
        ranges = (piece_range(size, piece) for piece in range(num_pieces(size)))
        part = Part(flat.toreadonly(), tuple(checksum(flat[start:end]) for start, end in ranges))
        with self._lock:
            if index in self._parts:
                raise ValueError(f"part {index} is filled already")
            self._parts[index] = part
        self._tell()

    def abandon(self, reason: str) -> None:
        """No further part will come: those who wait for one hear `reason`. What is filled can still be taken."""
        with self._lock:
            self.reason = self.reason or reason
        self._tell()

    def part(self, index: int) -> Part | None:
        """None while it is not ready. Raises TransferFailed when it never will be."""
        with self._lock:
            part = self._parts.get(index)
            if part is None and self.reason is not None:
                raise TransferFailed(self.reason)
            return part

    def watch(self, changed: Callable[[], None]) -> None:
        """`changed` is called, on whatever thread, after parts were filled or the parcel was abandoned."""
        with self._lock:
            self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        with self._lock:
            self._watchers.remove(changed)

    def _tell(self) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for changed in watchers:
            changed()
