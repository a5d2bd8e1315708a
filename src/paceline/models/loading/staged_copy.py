"""Copies of weights from host memory to a GPU through pinned memory."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from paceline.models.cuda_graph import StreamEvent, staging_tensor

T = TypeVar("T")

CHUNK_BYTES = 16 << 20
THREADS = 4
"""Threads that load layers to a GPU: one thread copies to pinned memory slower than a fast disk reads."""


def in_threads(load: Callable[[int], T], numbers: Iterable[int], device: torch.device) -> list[T]:
    """`load` of every number, in order; for a GPU in several threads."""
    if device.type != "cuda":
        return [load(number) for number in numbers]
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(THREADS, initializer=torch.cuda.set_device, initargs=(index,)) as pool:
        return list(pool.map(load, numbers))


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
