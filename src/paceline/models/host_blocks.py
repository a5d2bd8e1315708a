"""Memory of the host for blocks of a runner's cache, and copies between the two that nobody waits for."""

from collections.abc import Sequence

import torch

from paceline.models.cuda_graph import Stamp
from paceline.models.kv_blocks import Rows, block_bytes, chunks, gather, planes, scatter
from paceline.models.runner import ModelRunner


class HostBlocks:
    """`num_slots` blocks. `save` and `load` belong to the engine's thread: on a GPU they take their place in its stream of
    work, and a slot may be looked at once `wait` has returned. `view` and `wait` may be called from any thread, as long as
    it alone uses the slot."""

    def __init__(self, runner: ModelRunner, num_slots: int) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes(runner)
        self._planes = planes(runner)
        self._is_cuda = runner.device.type == "cuda"
        # [slots, planes, E]; on a GPU pinned, or copies would wait
        self._memory = torch.empty(
            num_slots, len(self._planes), self._planes[0].shape[1], dtype=torch.uint8, pin_memory=self._is_cuda
        )
        self._bytes: Rows = self._memory.numpy().reshape(num_slots, self.block_bytes)
        self._under_way: dict[int, Stamp] = {}

    @torch.inference_mode()
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """What is in `blocks` now, whatever is written there afterwards, into `slots`."""
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
        self._note(slots)

    @torch.inference_mode()
    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Into `blocks`, before whatever the engine does next reads them."""
        if not self._is_cuda:
            memory = self._memory.numpy()
            for i, plane in enumerate(self._planes):
                cache = plane.numpy()
                for slot, block in zip(slots, blocks, strict=True):
                    cache[block] = memory[slot, i]
            return
        for part in chunks(blocks, self.block_bytes):
            own = slots[part]
            values = torch.empty(len(own), *self._memory.shape[1:], dtype=torch.uint8, device=self._planes[0].device)
            for row, slot in zip(values, own, strict=True):
                row.copy_(self._memory[slot], non_blocking=True)
            scatter(self._planes, blocks[part], values)
        self._note(slots)

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, `block_bytes` of them, to read and to write."""
        return memoryview(self._bytes[slot])

    def wait(self, slot: int) -> None:
        """Until no copy from or to the slot is under way."""
        stamp = self._under_way.get(slot)
        if stamp is not None:
            stamp.wait()

    def _note(self, slots: Sequence[int]) -> None:
        stamp = Stamp(self._planes[0].device)
        stamp.record()
        self._under_way.update(dict.fromkeys(slots, stamp))
