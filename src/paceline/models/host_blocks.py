"""Host memory for blocks of a runner's cache, with asynchronous copies between the two."""

from collections.abc import Sequence

import torch

from paceline.models.cuda_graph import StreamEvent
from paceline.models.kv_blocks import ByteArray, block_bytes, chunks, gather, planes, scatter
from paceline.models.runner import ModelRunner


class HostBlocks:
    """Memory of `num_slots` blocks. Only the engine's thread calls `save` and `load`, which submit copies to its GPU stream.
    Any thread may call `view` and `wait` if no other thread uses the slot. Call `wait` before reading a slot."""

    def __init__(self, runner: ModelRunner, num_slots: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes(runner)
        self._planes = planes(runner)
        self._is_cuda = runner.device.type == "cuda"
        # [slots, planes, E]; pinned for a GPU, otherwise copies would block
        self._memory = torch.empty(
            num_slots, len(self._planes), self._planes[0].shape[1], dtype=torch.uint8, pin_memory=self._is_cuda
        )
        self._bytes: ByteArray = self._memory.numpy().reshape(num_slots, self.block_bytes)
        self._pending: dict[int, StreamEvent] = {}

    @torch.inference_mode()
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the present contents of `blocks` to `slots`. Later writes to the blocks do not affect the copy."""
        if not self._is_cuda:
            memory = self._memory.numpy()
            for i, plane in enumerate(self._planes):
                cache = plane.numpy()
                for block, slot in zip(blocks, slots, strict=True):
                    memory[slot, i] = cache[block]
            return
        for part in chunks(blocks, self.block_bytes):
            values = gather(self._planes, blocks[part])
            for row, slot in zip(values, slots[part], strict=True):
                self._memory[slot].copy_(row, non_blocking=True)
        self._record(slots)

    @torch.inference_mode()
    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy `slots` to `blocks`, before any pass that the engine submits next."""
        if not self._is_cuda:
            memory = self._memory.numpy()
            for i, plane in enumerate(self._planes):
                cache = plane.numpy()
                for slot, block in zip(slots, blocks, strict=True):
                    cache[block] = memory[slot, i]
            return
        for part in chunks(blocks, self.block_bytes):
            chunk = slots[part]
            values = torch.empty(len(chunk), *self._memory.shape[1:], dtype=torch.uint8, device=self._planes[0].device)
            for row, slot in zip(values, chunk, strict=True):
                row.copy_(self._memory[slot], non_blocking=True)
            scatter(self._planes, blocks[part], values)
        self._record(slots)

    def view(self, slot: int) -> memoryview:
        """The `block_bytes` bytes of a slot, for reading and writing."""
        return memoryview(self._bytes[slot])

    def wait(self, slot: int) -> None:
        """Block until no copy from or to the slot is pending."""
        event = self._pending.get(slot)
        if event is not None:
            event.wait()

    def _record(self, slots: Sequence[int]) -> None:
        event = StreamEvent(self._planes[0].device)
        event.record()
        self._pending.update(dict.fromkeys(slots, event))
