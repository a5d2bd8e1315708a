"""Files of the disk tier: one per block, kept across restarts, verified on every read."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.core.errors import InvalidConfig
from paceline.kv.tiers.block import HEADER_BYTES, BadBlock, TieredBlock, check_contents, pack_header, unpack_header

logger = logging.getLogger(__name__)

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
