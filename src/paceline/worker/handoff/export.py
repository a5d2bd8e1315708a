"""One prompt that a worker sends to another: copies blocks of its cache to parts of a transfer, or only their numbers.

`StagingPool` is the host memory of prompts that are sent. It is kept for the next prompts, because pages of new memory cost
more than the copy to them.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.hooks import BlockPart, HandoffPlan, NumberPart, StatePart, pack_numbers
from paceline.models.blocks import read_layer
from paceline.models.device import StreamEvent, staging_bytes
from paceline.models.runner import ModelRunner
from paceline.transfer import Transfer
from paceline.wire.transfer_messages import TransferHandle
from paceline.wire.transport import Peer

MAX_BYTES = 1 << 28
"""Bytes that are kept while no prompt uses them."""


class StagingPool:
    """Buffers by size. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[memoryview]] = {}
        self.num_bytes = 0
        """Bytes that are kept."""

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes with undefined content."""
        kept = self._free.get(size)
        if not kept:
            return staging_bytes(size, self._device)
        self.num_bytes -= size
        return kept.pop()

    def give_back(self, buffer: memoryview) -> None:
        """Nothing may use the buffer any more. Its memory is freed if the pool has enough."""
        if self.num_bytes + buffer.nbytes <= MAX_BYTES:
            self.num_bytes += buffer.nbytes
            self._free.setdefault(buffer.nbytes, []).append(buffer)


@dataclass(slots=True, eq=False)
class _StateRows:
    """Hidden states of one part, as far as they are computed."""

    values: Tensor  # [layers, n, D] on the host
    missing: int


class ExportJob:
    """A `Sink` (`engine/hooks/handoff.py`). The engine's thread reports what is ready; `defer` runs the copies, in order, on a
    thread that may wait for the device."""

    def __init__(
        self,
        peer: Peer,
        attempt: int,
        request_id: str,
        plan: HandoffPlan,
        runner: ModelRunner,
        defer: "Defer",
        pool: StagingPool,
    ) -> None:
        """`pool` belongs to the thread that runs the copies."""
        self.peer = peer
        self.attempt = attempt
        self.request_id = request_id
        self.plan = plan
        self.parts = plan.parts()
        self.transfer = Transfer([plan.size(part) for part in self.parts])
        self.handle: TransferHandle | None = None
        self.is_over = False
        """Whether the job has ended, so that nothing more is copied."""
        self.num_missing = len(self.parts)
        """Parts that are not filled yet."""
        self._runner = runner
        self._defer = defer
        self._pool = pool
        self._buffers: list[memoryview] = []
        self._num_filled = [0] * plan.layout.num_layers
        """Filled parts by layer."""
        self._parts_of_layer = [
            [i for i, part in enumerate(self.parts) if isinstance(part, BlockPart) and part.layer == layer]
            for layer in range(plan.layout.num_layers)
        ]
        self._number_parts = deque((i, part) for i, part in enumerate(self.parts) if isinstance(part, NumberPart))
        """Parts with block numbers that are not filled yet."""
        self._state_parts = {i: part for i, part in enumerate(self.parts) if isinstance(part, StatePart)}
        self._rows: dict[int, _StateRows] = {}

    @property
    def num_staged_bytes(self) -> int:
        """Bytes on the host."""
        return sum(self.transfer.sizes)

    @property
    def is_read(self) -> bool:
        """Whether nothing reads the blocks any more. In place the target reads them until it ends the job."""
        return self.is_over or (not self.num_missing and not self.plan.in_place)

    def blocks(self, layer: int, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        if not self.plan.in_place:
            self._defer(self, lambda: self._fill_layer(layer, blocks, ready))
        elif layer == self.plan.layout.num_layers - 1:  # The device has then computed all layers
            self._defer(self, lambda: self._fill_numbers(blocks, ready))

    def states(self, start: int, states: Mapping[int, Tensor], ready: StreamEvent) -> None:
        self._defer(self, lambda: self._fill_states(start, states, ready))

    def free(self) -> None:
        """Give the memory of the parts back. On the thread of the copies, after the transfer was withdrawn."""
        while self._buffers:
            self._pool.give_back(self._buffers.pop())

    def _fill_layer(self, layer: int, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        """Copy all parts of the layer that are ready, at once."""
        ready.wait()
        waiting = self._parts_of_layer[layer][self._num_filled[layer] :]
        indices = [index for index in waiting if self.parts[index].stop <= len(blocks)]
        if not indices:
            return
        start, stop = self.parts[indices[0]].start, self.parts[indices[-1]].stop
        data = self._pool.take((stop - start) * self.plan.layout.layer_bytes)
        self._buffers.append(data)
        read_layer(self._runner, layer, blocks[start:stop], data)
        for index in indices:
            size = self.transfer.sizes[index]
            self._fill(index, data[:size])
            data = data[size:]
        self._num_filled[layer] += len(indices)

    def _fill_numbers(self, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        ready.wait()
        while self._number_parts and self._number_parts[0][1].stop <= len(blocks):
            index, part = self._number_parts.popleft()
            self._fill(index, pack_numbers(blocks[part.start : part.stop]))

    @torch.inference_mode()
    def _fill_states(self, start: int, states: Mapping[int, Tensor], ready: StreamEvent) -> None:
        ready.wait()
        stacked = torch.stack([states[layer] for layer in self.plan.state_layers]).cpu()  # [layers, n, D]
        end = start + stacked.shape[1]
        for index, part in list(self._state_parts.items()):
            first, last = max(start, part.start), min(end, part.stop)
            if first >= last:
                continue
            if index not in self._rows:
                shape = (stacked.shape[0], part.stop - part.start, stacked.shape[2])
                self._rows[index] = _StateRows(torch.empty(shape, dtype=stacked.dtype), part.stop - part.start)
            rows = self._rows[index]
            rows.values[:, first - part.start : last - part.start] = stacked[:, first - start : last - start]
            rows.missing -= last - first
            if not rows.missing:
                del self._rows[index], self._state_parts[index]
                self._fill(index, rows.values.view(torch.uint8).numpy().data)

    def _fill(self, index: int, data: memoryview) -> None:
        self.num_missing -= 1  # before `fill`: the client may cancel the job right after the last part
        self.transfer.fill(index, data)


Defer = Callable[[ExportJob, Callable[[], None]], None]
