"""The ranks that compute a model together, as one of them sees it: sums over all ranks.

Ranks that share one GPU sum through device memory that all of them map by CUDA IPC.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store

from paceline.models.device import Graph, graph_in_capture
from paceline.models.parallel.commands import RankSpec

GROUP_TIMEOUT = timedelta(minutes=10)
"""Timeout of a collective operation."""


class RankGroup:
    """A process can be in one group at a time."""

    def __init__(self, spec: RankSpec, rank: int) -> None:
        self._spec, self._rank = spec, rank
        self._add: Callable[[Tensor], object] = dist.all_reduce
        self._graphs: WeakSet[Graph[Any]] = WeakSet()
        """Graphs with sums."""

    def join(self, store: Store) -> None:
        """Join the process group. Blocks until all ranks have joined."""
        spec, device = self._spec, self._spec.device_of(self._rank)
        uses_nccl = device.type == "cuda" and not spec.shares_device  # NCCL refuses two ranks on one GPU
        dist.init_process_group(
            "nccl" if uses_nccl else "gloo",
            store=store,
            rank=self._rank,
            world_size=spec.size,
            timeout=GROUP_TIMEOUT,
            device_id=device if uses_nccl else None,
        )
        if device.type == "cuda" and spec.shares_device:
            from paceline.models.parallel.device_sum import DeviceSum

            self._add = DeviceSum(self._rank, spec.size, device).add

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, in place; it is the same on every rank, to the bit. On a GPU it can be captured."""
        graph = graph_in_capture()
        if graph is not None:
            self._graphs.add(graph)
        self._add(partial)
        return partial

    def leave(self) -> None:
        """Leave the process group, if this process is in one. Graphs with sums cannot be replayed any more."""
        for graph in self._graphs:  # HAZARD: NCCL waits for their end before it destroys a communicator
            graph.release()
        if dist.is_initialized():
            dist.destroy_process_group()
