"""Host memory for blocks of a runner's cache, with asynchronous copies between the two."""

from collections.abc import Sequence

import torch

from paceline.models.blocks.kv_blocks import (
    ByteArray,
    block_bytes,
    chunks,
    copy_in,
    copy_out,
    finish_writes,
    gather,
    head_shares,
    row_shape,
    scatter,
)
from paceline.models.device import StreamEvent
from paceline.models.runner import ModelRunner


class HostBlocks:
    """Memory of `num_slots` blocks. Only the engine's thread calls `save` and `load`, which submit copies to its GPU stream.
    Any thread may call `view` and `wait` if no other thread uses the slot. Call `wait` before reading a slot."""

    def __init__(self, runner: ModelRunner, num_slots: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes(runner)
        self._runner, self._shares = runner, head_shares(runner)
        self._is_cuda = runner.device.type == "cuda"
        # [slots, planes, BLOCK_SIZE, shares, E]; pinned for a GPU, otherwise copies would block
        shape = num_slots, *row_shape(self._shares)
        self._memory = torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._bytes: ByteArray = self._memory.numpy().reshape(num_slots, self.block_bytes)
        self._pending: dict[int, StreamEvent] = {}

    @torch.inference_mode()
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy the present contents of `blocks` to `slots`. Later writes to the blocks do not affect the copy."""
        self._runner.settle()
        for number, share in enumerate(self._shares):
            memory = self._memory[:, :, :, number]  # [slots, planes, BLOCK_SIZE, E]
            if not self._is_cuda:
                copy_out(share, blocks, [memory.numpy()[slot] for slot in slots])
                continue
            for part in chunks(blocks, self.block_bytes):
                values = gather(share.planes, blocks[part])
                for row, slot in zip(values, slots[part], strict=True):
                    memory[slot].copy_(row, non_blocking=True)
        self._record(slots)

    @torch.inference_mode()
    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy `slots` to `blocks`, before any pass that the engine submits next."""
        self._runner.settle()
        for number, share in enumerate(self._shares):
            memory = self._memory[:, :, :, number]
            if not self._is_cuda:
                copy_in(share, blocks, [memory.numpy()[slot] for slot in slots])
                continue
            for targets in (share.planes, *share.copies):
                for part in chunks(blocks, self.block_bytes):
                    chunk = slots[part]
                    values = torch.empty(len(chunk), *memory.shape[1:], dtype=torch.uint8, device=targets[0].device)
                    for row, slot in zip(values, chunk, strict=True):
                        row.copy_(memory[slot], non_blocking=True)
                    scatter(targets, blocks[part], values)
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
        finish_writes(self._shares)
        if not self._is_cuda:
            return
        event = StreamEvent(self._runner.device)
        event.record()
        self._pending.update(dict.fromkeys(slots, event))
