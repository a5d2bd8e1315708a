"""The disk tier's files: one a block, found again after a restart, never believed without looking."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import InvalidConfig
from paceline.kv.tiers.block import TieredBlock
from paceline.kv.tiers.disk_block import HEADER_BYTES, BadBlock, check_contents, pack_header, unpack_header

logger = logging.getLogger(__name__)

SUFFIX, UNFINISHED = ".kv", ".tmp"
MODE = 0o600
"""Blocks say what tenants wrote as plainly as its text would."""


class DiskFolder:
    """Files appear by renaming, whole or not at all. Nothing is flushed to the platter: what a power cut leaves behind in
    pieces fails its checksums and is computed again, which costs less than waiting for the disk at every block would.

    One process at a time may use a folder. Methods may be called from one thread.
    """

    def __init__(self, folder: Path, fingerprint: bytes, block_bytes: int) -> None:
        """`fingerprint`, 32 bytes: of everything that a block's contents depend on besides its key."""
        self.folder = folder
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, MODE)
        except OSError as error:
            raise InvalidConfig(f"kv_disk {str(folder)!r} cannot be used: {error}; give a folder of your own") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InvalidConfig(
                f"kv_disk {str(folder)!r} is in use by another process: give each its own folder, or stop that one"
            ) from None

    @property
    def file_bytes(self) -> int:
        """Of one block, header included."""
        return HEADER_BYTES + self._block_bytes

    def scan(self) -> Iterator[TieredBlock]:
        """Blocks of ours that were here before, those used longest ago first. What is unfinished, truncated or foreign is
        deleted; contents are looked at when they are read."""
        found: list[tuple[int, TieredBlock]] = []
        for path in self._files():
            try:
                if path.suffix == UNFINISHED:
                    raise BadBlock("it was never finished")
                block, used = self._look(path)
            except BadBlock as error:
                logger.info("%s is deleted: %s", path, error)
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be read: %s", path, error)
            else:
                found.append((used, block))
        found.sort(key=lambda one: one[0])
        return (block for _, block in found)

    def write(self, block: TieredBlock, contents: memoryview) -> bool:
        """False for a block that cannot be kept. Raises `OSError` where the disk says no; nothing is left behind then."""
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
        """Into `into`, `block_bytes` of them. None, and the file is gone, if it is not whole and what `key` says it is."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                block, size, crc = unpack_header(file.read(HEADER_BYTES) or b"", self._fingerprint)
                if block.key != key or size != self._block_bytes:
                    raise BadBlock("it is another block than its name says")
                rest = into
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
                if rest or file.read(1):
                    raise BadBlock("it is cut off, or too long")
            check_contents(into, crc)
            os.utime(path)  # its age decides who goes first, after a restart too
        except FileNotFoundError:
            return None
        except (BadBlock, OSError) as error:
            logger.warning("the block in %s is computed again: %s", path, error)
            self.remove(key)
            return None
        return block

    def remove(self, key: bytes) -> None:
        """As far as the disk lets us: what stays is looked at again after a restart."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def close(self) -> None:
        """Let others have the folder; what is in it stays."""
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
            raise BadBlock("it is cut off, or not what its name says")
        return block, state.st_mtime_ns

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"
