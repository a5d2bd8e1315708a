"""Weights in device memory that a worker on the same machine copies itself: no byte of them passes through the host."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.loading.weight_manifest import DTYPES, ExportedWeights, PartForm
from paceline.runtime.transfer.device_memory import DeviceMemory
from paceline.runtime.transfer.messages import MemoryRegion
from paceline.runtime.transfer.transfer import ChannelUnavailable

logger = logging.getLogger(__name__)

WORDS = 1 << 21
"""Words of 8 bytes that `device_checksum` adds at a time. Bounds its memory."""

Stream = AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class SharedPart:
    """One part: its tensors in the order of the manifest."""

    regions: tuple[MemoryRegion, ...]
    checksum: str


class SharedParts:
    """The parts of a model on a device that other processes can map. Used by one thread."""

    def __init__(self, weights: ExportedWeights, memory: DeviceMemory) -> None:
        self._weights, self._memory = weights, memory
        self._stream = side_stream(weights.device)
        self._found: dict[int, SharedPart | None] = {}
        last = self.find(len(weights.manifest.parts) - 1)
        self.probe = None if last is None else last.regions[0]
        """A region to test whether a client can map this memory; None: no client can."""

    def find(self, part: int) -> SharedPart | None:
        """None: the part is not in memory that can be mapped, such as the tokenizer."""
        if part not in self._found:
            self._found[part] = self._share(part)
        return self._found[part]

    def _share(self, part: int) -> SharedPart | None:
        tensors = self._weights.tensors(part)
        try:
            regions = tuple(self._memory.share(tensor) for tensor in tensors)
        except ChannelUnavailable as unavailable:
            logger.info("part %d of the weights is sent as bytes: %s", part, unavailable)
            return None
        with self._stream:
            return SharedPart(regions, device_checksum(tensors))


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
        with self._stream:  # memory of this stream: another one may still use what it has freed
            self.tensors = [torch.empty(one.shape, dtype=DTYPES[one.dtype], device=device) for one in form.tensors]

    @torch.inference_mode()
    def copy(self, index: int) -> None:
        """Start to copy one tensor."""
        with self._stream:
            as_bytes(self.tensors[index]).copy_(self._sources[index])

    def checksum(self) -> str:
        """Wait for all copies and return the checksum of the tensors."""
        with self._stream:
            return device_checksum(self.tensors)


def side_stream(device: torch.device) -> Stream:
    """Work inside it does not wait for the engine's. It can be entered again."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@torch.inference_mode()
def device_checksum(tensors: Sequence[Tensor]) -> str:
    """64 bits in hex, of the bytes of contiguous tensors, computed on their device: sums of words, each times an odd factor by
    its place. It detects lost, stale and exchanged bytes. It is no protection against an attacker."""
    total = 0
    for tensor in tensors:
        flat = as_bytes(tensor.detach())
        whole = flat.numel() // 8 * 8
        sums = [flat[whole:].sum(dtype=torch.int64)]
        words = flat[:whole].view(torch.int64)
        factors = torch.arange(1, 2 * min(WORDS, words.numel()) + 1, 2, device=flat.device)
        for start in range(0, words.numel(), WORDS):
            part = words[start : start + WORDS]
            sums.append((part * factors[: part.numel()]).sum())
        for value in torch.stack(sums).tolist():
            total = (1_000_003 * total + value) % 2**64
    return f"{total:016x}"
