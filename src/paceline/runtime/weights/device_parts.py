"""Weights in device memory that a worker on the same machine copies itself: no byte of them passes through the host."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.cuda_graph import side_stream
from paceline.models.loading.weight_manifest import DTYPES, ExportedWeights, PartForm
from paceline.models.memory_checksum import memory_checksum
from paceline.runtime.transfer.device_memory import DeviceMemory
from paceline.runtime.transfer.messages import MemoryRegion
from paceline.runtime.transfer.transfer import ChannelUnavailable

logger = logging.getLogger(__name__)


class SharedParts:
    """The parts of a model on a device that other processes can map. Used by one thread."""

    def __init__(self, weights: ExportedWeights, memory: DeviceMemory) -> None:
        self._weights, self._memory = weights, memory
        self._found: dict[int, list[MemoryRegion]] = {}
        last = self.find(len(weights.manifest.parts) - 1)
        self.probe = last[0] if last else None
        """A region to test whether a client can map this memory. None if no client can."""

    def find(self, part: int) -> list[MemoryRegion]:
        """Memory of the part's tensors, in the order of the manifest. Empty if it cannot be mapped, such as that of the
        tokenizer."""
        if part not in self._found:
            self._found[part] = self._share(part)
        return self._found[part]

    def _share(self, part: int) -> list[MemoryRegion]:
        try:
            return [self._memory.share(tensor) for tensor in self._weights.tensors(part)]
        except ChannelUnavailable as unavailable:
            logger.info("part %d of the weights is sent as bytes: %s", part, unavailable)
            return []


class PartCopy:
    """Copies one part from the device memory of another worker, in a stream of its own."""

    def __init__(
        self, form: PartForm, regions: Sequence[MemoryRegion], memory: DeviceMemory, device: torch.device
    ) -> None:
        """Raises ChannelUnavailable if a region cannot be mapped, ValueError if it is not the memory of its tensor."""
        if [region.size for region in regions] != [tensor.nbytes for tensor in form.tensors]:
            raise ValueError("its regions of memory have other sizes than its tensors")
        self._sources = [memory.open(region) for region in regions]
        self._stream = side_stream(device)
        with self._stream:  # Another stream may still use memory that it has freed
            self.tensors = [
                torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=device) for tensor in form.tensors
            ]

    @torch.inference_mode()
    def copy(self, index: int) -> None:
        """Start to copy one tensor."""
        with self._stream:
            as_bytes(self.tensors[index]).copy_(self._sources[index])

    def checksum(self) -> str:
        """Wait for all copies and return the checksum of the tensors."""
        with self._stream:
            return memory_checksum(self.tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
