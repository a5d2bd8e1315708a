"""The KV cache of a rank in memory that rank 0 can map, so that rank 0 reads and writes whole blocks.

On a CPU a cache is a mapped file without a name, which rank 0 maps too. On a GPU it is device memory that rank 0 opens by CUDA
IPC. Nothing of it remains after its processes have ended.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.models.families.spec import DecoderSpec
from paceline.models.runner import Cache


@dataclass(frozen=True, slots=True)
class CacheShape:
    num_layers: int
    num_blocks: int
    num_kv_heads: int
    """Key-value heads of one rank."""
    head_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(config: DecoderSpec, num_blocks: int, dtype: torch.dtype) -> "CacheShape":
        """`config` is the configuration of one rank's share."""
        return CacheShape(config.num_layers, num_blocks, config.num_kv_heads, config.head_dim, dtype)

    @property
    def plane(self) -> tuple[int, int, int, int]:
        """Shape of the keys, or of the values, of one layer."""
        return self.num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_dim

    @property
    def nbytes(self) -> int:
        return 2 * self.num_layers * math.prod(self.plane) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemoryHandles:
    """Handles of GPU memory: for each layer, functions and arguments that open its keys and values in another process."""

    layers: tuple[tuple[tuple[Callable[..., Tensor], tuple[Any, ...]], ...], ...]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The handle of the file follows on the same connection."""


class SharedCache:
    """A zeroed cache of a rank."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self._fd: int | None = None
        if device.type == "cpu":
            self._fd = _create_file(shape.nbytes)
            self.cache = _map(self._fd, shape)
        else:
            self.cache = [
                (
                    torch.zeros(shape.plane, dtype=shape.dtype, device=device),
                    torch.zeros(shape.plane, dtype=shape.dtype, device=device),
                )
                for _ in range(shape.num_layers)
            ]

    def send(self, connection: Connection) -> None:
        """Let the process at the other end of `connection` map the cache by `receive_cache`."""
        if self._fd is None:
            connection.send(DeviceMemoryHandles(tuple(tuple(reduce_tensor(x) for x in layer) for layer in self.cache)))
        else:
            connection.send(HostMemory())
            send_handle(connection, self._fd, 0)

    def close(self) -> None:
        """Release the cache; a mapping of another process stays valid. No pass may use it any more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self.cache = []


def receive_cache(answer: DeviceMemoryHandles | HostMemory, connection: Connection, shape: CacheShape) -> Cache:
    """Map the cache that `SharedCache.send` offers; `answer` is its first message."""
    if isinstance(answer, HostMemory):
        fd = recv_handle(connection)
        try:
            return _map(fd, shape)
        finally:
            os.close(fd)
    opened = [tuple(rebuild(*arguments) for rebuild, arguments in layer) for layer in answer.layers]
    return [(keys, values) for keys, values in opened]


def _create_file(size: int) -> int:
    """A file in memory where the system has such files, otherwise one that has no name any more. Pages take memory once they
    are written."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("paceline-kv")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


def _map(fd: int, shape: CacheShape) -> Sequence[tuple[Tensor, Tensor]]:
    values = torch.frombuffer(mmap.mmap(fd, shape.nbytes), dtype=shape.dtype)  # which keeps the mapping
    planes = values.view(shape.num_layers, 2, *shape.plane)
    return [(layer[0], layer[1]) for layer in planes]
