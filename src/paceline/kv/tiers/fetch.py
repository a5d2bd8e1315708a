"""The memory of the host tier, blocks being fetched, and counters."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class SlotMemory(Protocol):
    """Memory for `num_slots` blocks; see `models/host_blocks.py`."""

    @property
    def num_slots(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def view(self, slot: int) -> memoryview: ...

    def wait(self, slot: int) -> None: ...


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks to bring into host memory. They stay there until `TierStore.finish`."""

    keys: Sequence[bytes]
    """Keys of one chain, in order. If one block is missing, the fetch ends before it."""
    leased: list[bytes] = field(default_factory=list)
    from_disk: set[bytes] = field(default_factory=set)
    is_done: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts since the start."""

    disk_read: int = 0
    disk_written: int = 0
    """Bytes."""
    bad: int = 0
    """Blocks on disk that failed a check; they are computed again."""
    dropped: int = 0
    """Blocks not stored: all slots were in use, or the disk failed."""
