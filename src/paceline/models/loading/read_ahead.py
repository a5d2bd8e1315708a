"""Reads files into the page cache in large blocks and several threads, ahead of the code that maps them.

A mapped file is read in pages at the place of its first access, which leaves most of a disk's bandwidth unused.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

BLOCK = 8 << 20
THREADS = 8


class ReadAhead:
    """Reads `paths` in order until the context ends. A file that cannot be read is left to its reader's error."""

    def __init__(self, paths: Sequence[Path], threads: int = THREADS, block: int = BLOCK) -> None:
        self._blocks, self._block = _blocks(paths, block), block
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._read, daemon=True) for _ in range(threads)]
        self.num_bytes = 0
        """Bytes read so far."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        buffer = bytearray(self._block)
        while not self._is_closed:
            with self._lock:
                path, offset = next(self._blocks, (None, 0))
            if path is None:
                return
            try:
                with path.open("rb", buffering=0) as file:
                    count = os.preadv(file.fileno(), [buffer], offset)
            except OSError:
                return
            with self._lock:
                self.num_bytes += count


def _blocks(paths: Sequence[Path], block: int) -> Iterator[tuple[Path, int]]:
    """(file, offset) of all blocks."""
    for path in paths:
        size = path.stat().st_size if path.is_file() else 0
        yield from ((path, offset) for offset in range(0, size, block))
