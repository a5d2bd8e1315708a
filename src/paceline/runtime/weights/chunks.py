"""A part of a model as the chunks it travels in: small enough that a giver can pace them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.loading.weight_manifest import TensorForm, host_bytes

CHUNK_BYTES = 4 << 20
"""Both sides cut alike: every tensor by itself, in order."""


def chunk_ranges(tensors: Sequence[TensorForm]) -> list[tuple[int, int, int]]:
    """(tensor, start, end) of each chunk, in bytes."""
    return [
        (i, start, min(start + CHUNK_BYTES, tensor.nbytes))
        for i, tensor in enumerate(tensors)
        for start in range(0, tensor.nbytes, CHUNK_BYTES)
    ]


def chunk_bytes(tensor: Tensor, start: int, end: int) -> memoryview:
    """A view of memory on the host, a copy of what is on a device."""
    return host_bytes(tensor.detach().reshape(-1).view(torch.uint8)[start:end].cpu())
