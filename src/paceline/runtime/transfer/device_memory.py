"""Memory of a device that other processes of this machine map and read in place, without a copy on the host."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.runtime.transfer.messages import MemoryRegion


class DeviceMemory(Protocol):
    """Any thread may use it."""

    def share(self, tensor: Tensor) -> MemoryRegion:
        """The memory of a contiguous tensor, which must stay allocated while other processes read it. Raises ChannelUnavailable
        if no other process can map it."""
        ...

    def open(self, region: MemoryRegion) -> Tensor:
        """The bytes of a region of another process. They stay mapped as long as the tensor exists. Raises ChannelUnavailable
        if this process cannot map it."""
        ...


def device_memory(device: torch.device, channels: Sequence[str] | None) -> DeviceMemory | None:
    """The memory of `device`. None if it cannot be shared, or if `channels` exclude shared memory on one machine."""
    if device.type != "cuda" or (channels is not None and "memory" not in channels):
        return None
    from paceline.runtime.transfer.cuda_memory import CudaMemory

    return CudaMemory(device)
