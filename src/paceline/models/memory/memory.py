"""Memory of tensors: zeroed memory for caches, and the checksum of tensors on the device that they are on."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.cpu.checksums import word_sum, word_sum_reference

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
