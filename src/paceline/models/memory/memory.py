"""Memory of tensors: zeroed memory for caches, checksums on the device of the tensors, and copies of weights to a GPU.

`StagedCopies` copies from host memory to a GPU through pinned memory. `ReadAhead` reads files into the page cache in large
blocks and several threads, ahead of the code that maps them. A mapped file is read in pages at the place of its first access,
which leaves most of a disk's bandwidth unused.
"""

import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from paceline.core.machine import show_share
from paceline.kernels.cpu.checksums import word_sum, word_sum_reference
from paceline.models.device import StreamEvent, staging_tensor

WORDS = 1 << 21
"""Words of 8 bytes that are added at a time. Bounds the memory of the computation."""


@torch.inference_mode()
def memory_checksum(tensors: Sequence[Tensor]) -> str:
    """64 bits in hex, of the bytes of tensors, the same on every device that they are on. It detects lost, stale and
    exchanged bytes. It is no protection against an attacker."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        batches, tail = flat[:whole].view(torch.int64).split(WORDS), flat[whole:].sum(dtype=torch.int64)
        if flat.is_cpu:
            sums = [int(tail), *(word_sum(batch) for batch in batches if batch.numel())]
        else:  # one wait for the device
            sums = torch.stack([tail, *(word_sum_reference(batch) for batch in batches if batch.numel())]).tolist()
        for value in sums:
            total = (1_000_003 * total + value) % 2**64
    return f"{total:016x}"


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On a CPU a page takes memory only once it is written."""
    count = math.prod(shape)
    if device.type != "cpu" or count == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # which keeps the memory


T = TypeVar("T")

CHUNK_BYTES = 16 << 20
COPY_THREADS = 4
"""Threads that load layers to a GPU: one thread copies to pinned memory slower than a fast disk reads."""


def in_threads(load: Callable[[int], T], numbers: Sequence[int], device: torch.device) -> list[T]:
    """`load` of every number, in order; for a GPU in several threads. The share that is loaded is reported."""
    ended = itertools.count(1)

    def load_and_report(number: int) -> T:
        loaded = load(number)
        show_share(next(ended) / len(numbers))
        return loaded

    if device.type != "cuda":
        return [load_and_report(number) for number in numbers]
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(COPY_THREADS, initializer=torch.cuda.set_device, initargs=(index,)) as pool:
        return list(pool.map(load_and_report, numbers))


class StagedCopies:
    """Copies of several threads. Each has two pinned chunks: while the GPU copies from one, the thread fills the other."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self._local = threading.local()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source` in host memory to `target` [same shape] on the device, rounded to its dtype. `source` may be freed
        when the call returns; the copy is in the stream of the caller."""
        flat_target, flat_source = target.view(-1), source.reshape(-1)
        step = self._chunk_bytes // target.element_size()
        for first in range(0, len(flat_target), step):
            part = flat_target[first : first + step]
            chunk, copied = self._next_chunk()
            copied.wait()
            staged = chunk[: part.nbytes].view(part.dtype)
            staged.copy_(flat_source[first : first + step])
            part.copy_(staged, non_blocking=True)
            copied.record()

    def _next_chunk(self) -> tuple[Tensor, StreamEvent]:
        if not hasattr(self._local, "chunks"):
            self._local.chunks = [
                (staging_tensor(self._chunk_bytes, dtype=torch.uint8, device=self._device), StreamEvent(self._device))
                for _ in range(2)
            ]
        self._local.chunks.reverse()
        chunk: tuple[Tensor, StreamEvent] = self._local.chunks[0]
        return chunk


BLOCK = 8 << 20
READ_THREADS = 8


class ReadAhead:
    """Reads `paths` in order until the context ends. A file that cannot be read is left to its reader's error."""

    def __init__(self, paths: Sequence[Path], threads: int = READ_THREADS, block: int = BLOCK) -> None:
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
