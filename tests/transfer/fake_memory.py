"""A stand-in for device memory: handles name tensors in a table that the two sides of a test share."""

import secrets

import torch
from torch import Tensor

from paceline.transfer.transfer import ChannelUnavailable
from paceline.wire.transfer_messages import ID_BYTES, MemoryRegion

Table = dict[bytes, Tensor]


class FakeMemory:
    """A `DeviceMemory` of one process. Two of them with the same table are processes of one machine."""

    def __init__(self, table: Table) -> None:
        self.process = secrets.token_bytes(ID_BYTES)
        self._table = table
        self.num_opened = 0

    def share(self, tensor: Tensor) -> MemoryRegion:
        if not tensor.is_contiguous():
            raise ChannelUnavailable("not contiguous")
        handle = secrets.token_bytes(64)
        self._table[handle] = tensor.detach().view(-1).view(torch.uint8)
        return MemoryRegion(self.process, handle, 0, tensor.nbytes)

    def open(self, region: MemoryRegion) -> Tensor:
        if region.process == self.process or region.handle not in self._table:
            raise ChannelUnavailable("no such memory on this machine")
        self.num_opened += 1
        return self._table[region.handle][region.offset : region.offset + region.size]
