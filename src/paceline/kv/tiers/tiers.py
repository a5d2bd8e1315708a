"""The tiers of cached blocks below the device: host memory, files on disk, and the order of eviction.

`HostTier` knows which block each slot of host memory holds, and which blocks are being fetched into it. `DiskFolder` has one
file per block. The files are kept across restarts and verified on every read. `EvictionIndex` is the order of eviction in one
tier: the least recently used chain first, from its tail.
"""

import contextlib
import fcntl
import logging
import os
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.core.errors import InvalidConfig
from paceline.kv.tiers.block import HEADER_BYTES, BadBlock, TieredBlock, check_contents, pack_header, unpack_header

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    block: TieredBlock
    used: int
    children: int = 0
    leases: int = 0


class EvictionIndex:
    """The blocks of one tier. Only a *leaf*, a block without a child here, can be evicted, because a chain without its head is
    useless. Leased blocks stay. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: OrderedDict[bytes, None] = OrderedDict()  # next to evict first
        self._children: dict[bytes, int] = {}
        """Number of children of parents that are not here; a parent may be added later."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[TieredBlock]:
        return (entry.block for entry in self._entries.values())

    def block(self, key: bytes) -> TieredBlock:
        return self._entries[key].block

    def add(self, block: TieredBlock) -> None:
        """Add a block as the most recently used."""
        assert block.key not in self._entries
        entry = _Entry(block, self._tick(), self._children.pop(block.key, 0))
        self._entries[block.key] = entry
        if not entry.children:
            self._leaves[block.key] = None
        if block.parent is not None:
            parent = self._entries.get(block.parent)
            if parent is None:
                self._children[block.parent] = self._children.get(block.parent, 0) + 1
            else:
                parent.children += 1
                self._leaves.pop(block.parent, None)

    def use(self, key: bytes) -> None:
        """Mark the block as the most recently used."""
        self._entries[key].used = self._tick()
        if key in self._leaves:
            self._leaves.move_to_end(key)

    def lease(self, key: bytes) -> None:
        self._entries[key].leases += 1

    def release(self, key: bytes) -> None:
        entry = self._entries[key]
        assert entry.leases > 0
        entry.leases -= 1

    def is_leased(self, key: bytes) -> bool:
        return self._entries[key].leases > 0

    def oldest(self, spared: Container[bytes] = ()) -> bytes | None:
        """The key to evict next; one of `spared` only if there is no other. None if all leaves are leased."""
        last_resort = None
        for key in self._leaves:
            if self._entries[key].leases:
                continue
            if key not in spared:
                return key
            last_resort = last_resort or key
        return last_resort

    def remove(self, key: bytes) -> TieredBlock:
        """Remove the block. Its children here are unreachable until it is added again."""
        entry = self._entries.pop(key)
        self._leaves.pop(key, None)
        if entry.children:
            self._children[key] = entry.children
        if entry.block.parent is not None:
            self._orphan(entry.block.parent, entry.used)
        return entry.block

    def _orphan(self, parent: bytes, used: int) -> None:
        """`parent` lost a child that was last used at `used`."""
        above = self._entries.get(parent)
        if above is None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
            return
        above.children -= 1
        if not above.children:
            self._leaves[parent] = None
            if above.used <= used:  # as old as its evicted child: it is evicted next
                self._leaves.move_to_end(parent, last=False)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class HostTier:
    """A slot is empty, *taken* (being filled), or holds a block. A block is *backed* if it is on disk too: backed blocks are
    evicted first, from any place in their chain. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._index = EvictionIndex()
        self._slots: dict[bytes, int] = {}
        self._empty = list(range(num_slots))
        self._backed: OrderedDict[bytes, None] = OrderedDict()  # next to evict first

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    @property
    def blocks(self) -> list[TieredBlock]:
        return list(self._index)

    def take(self, spared: Container[bytes] = ()) -> tuple[int | None, bytes | None]:
        """A slot to fill and the key of the block evicted from it. Blocks in `spared` are evicted last. No slot if every one is
        taken or leased."""
        if self._empty:
            return self._empty.pop(), None
        key = next((key for key in self._backed if not self._index.is_leased(key)), None) or self._index.oldest(spared)
        if key is None:
            return None, None
        self._index.remove(key)
        self._backed.pop(key, None)
        return self._slots.pop(key), key

    def give_back(self, slot: int) -> None:
        """Return a taken slot that was not filled."""
        self._empty.append(slot)

    def add(self, block: TieredBlock, slot: int) -> bool:
        """Record the block of a filled slot. Returns False, and frees the slot, if the tier already has the block."""
        if block.key in self._index:
            self._empty.append(slot)
            return False
        self._index.add(block)
        self._slots[block.key] = slot
        return True

    def get(self, key: bytes) -> tuple[TieredBlock, int]:
        return self._index.block(key), self._slots[key]

    def run(self, keys: Sequence[bytes]) -> list[bytes]:
        """The longest prefix of `keys` that this tier has."""
        count = next((i for i, key in enumerate(keys) if key not in self._index), len(keys))
        return list(keys[:count])

    def use(self, key: bytes) -> None:
        self._index.use(key)
        if key in self._backed:
            self._backed.move_to_end(key)

    def back(self, key: bytes) -> None:
        """Mark the block as stored on disk; no error if this tier does not have it."""
        if key in self._index:
            self._backed[key] = None

    def unback(self, key: bytes) -> None:
        """Mark the block as no longer stored on disk."""
        self._backed.pop(key, None)

    def lease(self, key: bytes) -> None:
        """Keep the block until `release`; leases are counted."""
        self._index.lease(key)

    def release(self, key: bytes) -> None:
        self._index.release(key)


class SlotMemory(Protocol):
    """Memory for `num_slots` blocks; see `models/blocks/host_blocks.py`."""

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
class TierTraffic:
    """Counts since the start."""

    disk_read: int = 0
    disk_written: int = 0
    """Bytes."""
    bad: int = 0
    """Blocks on disk that failed a check; they are computed again."""
    dropped: int = 0
    """Blocks not stored: all slots were in use, or the disk failed."""


SUFFIX, UNFINISHED = ".kv", ".tmp"
MODE = 0o600
"""Permissions of the files: blocks reveal the text of their tokens."""


class DiskFolder:
    """A file appears by a rename, complete or not at all. Files are not flushed: a file that a power failure damaged fails its
    checksum and the block is computed again.

    One process at a time may use a folder, from one thread.
    """

    def __init__(self, folder: Path, fingerprint: bytes, block_bytes: int) -> None:
        """`fingerprint` has 32 bytes, which identify everything except its key that a block's contents depend on."""
        self.folder = folder
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, MODE)
        except OSError as error:
            raise InvalidConfig(f"kv_disk {str(folder)!r} cannot be used: {error}; choose another folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InvalidConfig(
                f"kv_disk {str(folder)!r} is in use by another process: give each process its own folder"
            ) from None

    @property
    def file_bytes(self) -> int:
        """Size of one file, header included."""
        return HEADER_BYTES + self._block_bytes

    def scan(self) -> Iterator[TieredBlock]:
        """The blocks in the folder, least recently used first. Unfinished, truncated and foreign files are deleted.
        Contents are verified when they are read."""
        found: list[tuple[int, TieredBlock]] = []
        for path in self._files():
            try:
                if path.suffix == UNFINISHED:
                    raise BadBlock("it is unfinished")
                block, used = self._look(path)
            except BadBlock as error:
                logger.info("deleted %s: %s", path, error)
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be read: %s", path, error)
            else:
                found.append((used, block))
        found.sort(key=lambda entry: entry[0])
        return (block for _, block in found)

    def write(self, block: TieredBlock, contents: memoryview) -> bool:
        """Returns False for a block that cannot be stored. If the disk fails, raises `OSError` and leaves no file."""
        header = pack_header(block, self._fingerprint, contents)
        if header is None:
            return False
        path = self._path(block.key)
        unfinished = path.with_suffix(UNFINISHED)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE), "wb", buffering=0) as file:
                for part in (memoryview(header), contents):
                    while part:
                        part = part[file.write(part) or 0 :]
            unfinished.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        return True

    def read(self, key: bytes, into: memoryview) -> TieredBlock | None:
        """Read the contents into `into`, `block_bytes` long. A file that fails a check is deleted; the result is then None."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                block, size, crc = unpack_header(file.read(HEADER_BYTES) or b"", self._fingerprint)
                if block.key != key or size != self._block_bytes:
                    raise BadBlock("its name belongs to another block")
                rest = into
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
                if rest or file.read(1):
                    raise BadBlock("its size is wrong")
            check_contents(into, crc)
            os.utime(path)  # the order of eviction after a restart
        except FileNotFoundError:
            return None
        except (BadBlock, OSError) as error:
            logger.warning("the block in %s will be computed again: %s", path, error)
            self.remove(key)
            return None
        return block

    def remove(self, key: bytes) -> None:
        """Delete the file. If that fails, the next start finds it again."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def close(self) -> None:
        """Unlock the folder; the files stay."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _files(self) -> Iterator[Path]:
        for part in sorted(self.folder.iterdir()):
            if part.is_dir() and len(part.name) == 2:
                yield from (path for path in part.iterdir() if path.suffix in (SUFFIX, UNFINISHED))

    def _look(self, path: Path) -> tuple[TieredBlock, int]:
        with path.open("rb", buffering=0) as file:
            block, size, _ = unpack_header(file.read(HEADER_BYTES) or b"", self._fingerprint)
            state = os.fstat(file.fileno())
        if state.st_size != self.file_bytes or size != self._block_bytes or path != self._path(block.key):
            raise BadBlock("its size or its name is wrong")
        return block, state.st_mtime_ns

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"
