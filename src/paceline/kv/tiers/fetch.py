"""What the tiers below the device work with: memory, blocks on their way up, and what is counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class SlotMemory(Protocol):
    """Room for `num_slots` blocks; see `models/host_blocks.py`."""

    @property
    def num_slots(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def view(self, slot: int) -> memoryview: ...

    def wait(self, slot: int) -> None: ...


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way into the host's memory, where they stay until `TierStore.finish`."""

    keys: Sequence[bytes]
    """Of one chain, in order. If one cannot be had, those after it are of no use."""
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
    """Blocks on disk that were not what they should be; they were computed again."""
    dropped: int = 0
    """Blocks that had to be forgotten: all slots were in use, or the disk did not take them."""
