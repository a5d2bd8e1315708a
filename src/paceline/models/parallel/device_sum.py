"""A sum over ranks that share one GPU, where NCCL refuses."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from paceline.kernels.gpu.rank_sum import MAX_PROGRAMS, MEMORY_BYTES, add_ranks


class DeviceSum:
    """The GPU runs one process at a time: a rank that waits for another blocks it until its time slice ends. For tests."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """All ranks construct it at the same time, as members of a process group."""
        self._rank = rank
        memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        own = reduce_tensor(memory)
        opened: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = [own] * size
        dist.all_gather_object(opened, own)
        self._memories = [memory if i == rank else rebuild(*arguments) for i, (rebuild, arguments) in enumerate(opened)]
        self._addresses = torch.tensor(
            [memory.data_ptr() for memory in self._memories], dtype=torch.int64, device=device
        )
        self._turns = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        dist.barrier()  # a rank that ends early would take its memory with it

    def add(self, values: Tensor) -> None:
        """Replace `values` by their sum over all ranks."""
        add_ranks(values, self._addresses, self._turns, self._rank)
