"""One part of the weights that arrives in chunks: in its own memory on the host, or on its way to a GPU."""

from collections import deque
from collections.abc import Sequence

import torch

from paceline.models.cuda_graph import StreamEvent, side_stream, staging_bytes
from paceline.models.loading.weight_manifest import DTYPES, PartForm, empty_part, tensor_bytes
from paceline.models.memory_checksum import memory_checksum
from paceline.runtime.weights.messages import CHUNK_BYTES

MAX_BUFFERS = 8
"""Buffers of a part. A fetch has fewer chunks in flight, and the remaining buffers are being copied to the device."""


class HostPart:
    """Receives `chunks` in the memory of the tensors. `get_buffer` and `copy` are the callbacks of a fetch."""

    def __init__(self, form: PartForm, chunks: Sequence[tuple[int, int, int]]) -> None:
        """`chunks` has (tensor, start, end) of each chunk, in bytes."""
        self._chunks, self.tensors = chunks, empty_part(form)
        self._views = [tensor_bytes(tensor) for tensor in self.tensors]

    def get_buffer(self, index: int) -> memoryview:
        tensor, start, end = self._chunks[index]
        return self._views[tensor][start:end]

    def copy(self, index: int) -> None:
        """The chunk is where it belongs."""

    def checksum(self) -> str:
        return memory_checksum(self.tensors)


class StagedPart:
    """Receives `chunks` in a few buffers and copies them to a device. Used by one thread."""

    def __init__(self, form: PartForm, chunks: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """`chunks` has (tensor, start, end) of each chunk, in bytes."""
        self._chunks, self._device, self._stream = chunks, device, side_stream(device)
        with self._stream:  # Another stream may still use memory that it has freed
            self.tensors = [
                torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=device) for tensor in form.tensors
            ]
        self._targets = [tensor.view(-1).view(torch.uint8) for tensor in self.tensors]
        self._filling: dict[int, memoryview] = {}
        """Buffers that chunks arrive in."""
        self._copied: deque[tuple[memoryview, StreamEvent]] = deque()
        """Buffers that the device reads until it has reached their event, in this order."""
        self._num_buffers = 0

    def get_buffer(self, index: int) -> memoryview:
        """Memory for a chunk. Waits for the device if all buffers are in use."""
        if self._num_buffers < MAX_BUFFERS or not self._copied:
            self._num_buffers += 1
            buffer = staging_bytes(CHUNK_BYTES, self._device)
        else:
            buffer, event = self._copied.popleft()
            event.wait()
        self._filling[index] = buffer
        _, start, end = self._chunks[index]
        return buffer[: end - start]

    @torch.inference_mode()
    def copy(self, index: int) -> None:
        """Start to copy a chunk that has arrived."""
        (tensor, start, end), buffer, event = self._chunks[index], self._filling.pop(index), StreamEvent(self._device)
        with self._stream:
            arrived = torch.frombuffer(buffer, dtype=torch.uint8, count=end - start)
            self._targets[tensor][start:end].copy_(arrived, non_blocking=True)
            event.record()
        self._copied.append((buffer, event))

    def checksum(self) -> str:
        """Wait for all copies and return the checksum of the tensors."""
        with self._stream:
            return memory_checksum(self.tensors)
