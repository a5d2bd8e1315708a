"""Host memory of prompts that are sent. It is kept for the next prompts, because pages of new memory cost more than the copy to
them."""

import torch

from paceline.models.cuda_graph import staging_bytes

MAX_BYTES = 1 << 28
"""Bytes that are kept while no prompt uses them."""


class StagingPool:
    """Buffers by size. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[memoryview]] = {}
        self.num_bytes = 0
        """Bytes that are kept."""

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes with undefined content."""
        kept = self._free.get(size)
        if not kept:
            return staging_bytes(size, self._device)
        self.num_bytes -= size
        return kept.pop()

    def give_back(self, buffer: memoryview) -> None:
        """Nothing may use the buffer any more. Its memory is freed if the pool has enough."""
        if self.num_bytes + buffer.nbytes <= MAX_BYTES:
            self.num_bytes += buffer.nbytes
            self._free.setdefault(buffer.nbytes, []).append(buffer)
