"""KV caches in device memory that workers on the same machine read in place: no block passes through the host."""

import logging
from collections.abc import Sequence

from torch import Tensor

from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.kv_blocks import layer_bytes, load_kernels, planes
from paceline.models.runner import ModelRunner
from paceline.runtime.transfer.device_memory import DeviceMemory
from paceline.runtime.transfer.messages import MemoryRegion
from paceline.runtime.transfer.transfer import ChannelUnavailable, TransferFailed

logger = logging.getLogger(__name__)

MAX_CACHES = 16
"""Caches of other workers that stay mapped."""


def share_cache(runner: ModelRunner, memory: DeviceMemory | None) -> list[MemoryRegion]:
    """Keys and values of every layer. Empty if other processes cannot map them. Caches that are divided among ranks are not
    shared, because rank 0 itself maps those of the remaining ranks and cannot pass them on."""
    if memory is None or runner.num_head_shares > 1 or len(runner.head_shares()[0]) > 1:
        return []
    try:
        return [memory.share(plane) for plane in planes(runner)]
    except ChannelUnavailable as unavailable:
        logger.info("blocks are sent through the host: %s", unavailable)
        return []


class PeerCaches:
    """Caches of other workers that this process has mapped, by process. Any thread may use it."""

    def __init__(self, runner: ModelRunner, memory: DeviceMemory | None) -> None:
        self._memory = memory
        self._num_planes = 2 * len(runner.cache)
        self._plane_bytes = layer_bytes(runner) // 2
        self._tested: dict[bytes, bool] = {}
        """Whether a process's memory can be mapped here."""
        self._planes: dict[bytes, list[Tensor]] = {}
        load_kernels(runner)

    def can_open(self, region: MemoryRegion | None) -> bool:
        """Whether this process can read caches of the worker that has this memory. The first call for a worker maps it."""
        if self._memory is None or region is None:
            return False
        if region.process not in self._tested:
            try:
                self._memory.open(region)
                self._tested[region.process] = True
            except ChannelUnavailable as unavailable:
                logger.info("a worker's blocks arrive through the host: %s", unavailable)
                self._tested[region.process] = False
        return self._tested[region.process]

    def open(self, regions: Sequence[MemoryRegion]) -> list[Tensor]:
        """Keys and values of every layer of another worker's cache: [num_blocks, BLOCK_SIZE, E] uint8. Raises TransferFailed if
        they are not a cache of this layout or cannot be mapped."""
        sizes = {region.size for region in regions}
        if (
            self._memory is None
            or len(regions) != self._num_planes
            or len(sizes) != 1
            or min(sizes) % self._plane_bytes
        ):
            raise TransferFailed("the worker's cache in memory has another layout than requested")
        process = regions[0].process
        found = self._planes.get(process)
        if found is None:
            try:
                opened = [self._memory.open(region) for region in regions]
            except ChannelUnavailable as unavailable:
                self._tested[process] = False
                raise TransferFailed(str(unavailable)) from None
            shape = min(sizes) // self._plane_bytes, BLOCK_SIZE, self._plane_bytes // BLOCK_SIZE
            found = [plane.view(shape) for plane in opened]
            while len(self._planes) >= MAX_CACHES:
                self._planes.pop(next(iter(self._planes)), None)
            self._planes[process] = found
        return found

    def close(self) -> None:
        self._planes.clear()
