"""The slots of a batch on the device: which sequence is in which slot, and the state of each slot.

`DeviceSlots` holds lengths, last tokens and sampling parameters by slot. `SlotTable` assigns the sequences of the graph
executor to slots.
"""

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.core.sequence import Sequence, Status
from paceline.engine.step.step import PICKING_BYTES
from paceline.kernels.gpu.speculation.accept import DeviceState
from paceline.kernels.gpu.speculation.pick import PickScratch, pick, pick_greedy, pick_scratch, pick_truncated
from paceline.models.device import StreamEvent, staging_tensor
from paceline.speculation.rows import Purpose, stream

Sampling = Literal["greedy", "sampled", "truncated"]
"""The simplest sampling kernel that serves every slot."""
WARM_UP_SAMPLING = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
"""One set of parameters for each `Sampling`."""


class Slot(NamedTuple):
    """One sequence, as the batch loads it."""

    ids: Seq[int]
    sampling: SamplingParams
    seed: int
    choice: int

    @staticmethod
    def of(sequence: Sequence) -> "Slot":
        return Slot(sequence.ids, sequence.sampling, sequence.seed, sequence.choice)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTensors:
    """Sampling parameters by slot."""

    streams: Tensor  # [B] int64
    top_k: Tensor  # [B] int64
    top_p: Tensor  # [B] float64
    temperature: Tensor  # [B] float32, 0: greedy
    min_p: Tensor  # [B] float32

    @staticmethod
    def in_memory(memory: Tensor) -> "SamplingTensors":
        """Views of `memory` [32 * B] uint8: adjacent, so that one copy transfers them."""
        size = len(memory) // 32
        longs, shares, floats = memory.split([16 * size, 8 * size, 8 * size])
        streams, top_k = longs.view(torch.int64).view(2, size)
        temperature, min_p = floats.view(torch.float32).view(2, size)
        return SamplingTensors(streams, top_k, shares.view(torch.float64), temperature, min_p)

    def map(self, change: Callable[[Tensor], Tensor]) -> "SamplingTensors":
        return SamplingTensors(*(change(getattr(self, field.name)) for field in fields(self)))


class SlotParams:
    """The sampling parameters of all slots. The host changes them in its own memory, and `upload` copies them to the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.zeros(32 * size, dtype=torch.uint8, device=device)
        self.on_device = SamplingTensors.in_memory(self._memory)
        self._written = torch.zeros(32 * size, dtype=torch.uint8)
        host = SamplingTensors.in_memory(self._written)
        self._columns = [getattr(host, field.name).numpy() for field in fields(host)]
        self._staging = [
            (staging_tensor(32 * size, dtype=torch.uint8, device=device), StreamEvent(device)) for _ in range(2)
        ]
        self._turn = 0
        self._is_stale = True
        self.sampling: Sampling = "greedy"
        for slot in range(size):
            self.clear(slot)
        self.upload()

    def clear(self, slot: int) -> None:
        """The slot is empty, which counts as greedy."""
        self._write(slot, 0, 0, 1.0, 0.0, 0.0)

    def set(self, slot: int, content: Slot) -> None:
        params, number = content.sampling, stream(Purpose.SHARED, content.seed, content.choice)
        temperature = 0.0 if params.is_greedy else params.temperature
        signed = number - (1 << 64) if number >> 63 else number
        self._write(slot, signed, params.top_k, params.top_p, temperature, params.min_p)

    def _write(self, slot: int, *values: float) -> None:
        """`values` in the order of `SamplingTensors`."""
        for column, value in zip(self._columns, values, strict=True):
            column[slot] = value
        self._is_stale = True

    def upload(self) -> None:
        """Make changes effective for the steps submitted from now on."""
        if not self._is_stale:
            return
        self._turn = 1 - self._turn
        staging, copied = self._staging[self._turn]
        copied.wait()
        staging.copy_(self._written)
        self._memory.copy_(staging, non_blocking=True)
        copied.record()
        self._is_stale = False
        _, top_k, top_p, temperature, min_p = self._columns
        is_sampled = temperature > 0.0
        is_cut = is_sampled & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
        self.sampling = "truncated" if is_cut.any() else "sampled" if is_sampled.any() else "greedy"


class DeviceSlots:
    """The state of the first `size` slots. Batches of different sizes share the memory of the largest."""

    def __init__(self, size: int, device: torch.device, largest: "DeviceSlots | None" = None) -> None:
        """`largest` holds the slots of the largest batch. If None, these are the slots of the largest batch, and they are
        empty."""
        self.size, self.device = size, device
        if largest is None:
            # Empty slots are greedy sequences of two tokens
            lengths = torch.full((size,), 2, dtype=torch.int32, device=device)
            self.state = DeviceState(lengths, torch.zeros(size, 2, dtype=torch.int64, device=device))
            self.params = SlotParams(size, device)
        else:
            self.state = DeviceState(largest.state.lengths[:size], largest.state.last[:size])
            self.params = largest.params
        self.tensors = self.params.on_device.map(lambda values: values[:size])

    @property
    def sampling(self) -> Sampling:
        return self.params.sampling

    def load(self, contents: Seq[Slot]) -> None:
        """Replace the contents with these sequences, in this order. No step is in flight."""
        padding = self.size - len(contents)
        lengths = [len(slot.ids) for slot in contents] + [2] * padding
        last = [list(slot.ids[-2:]) for slot in contents] + [[0, 0]] * padding
        self.state.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.state.last.copy_(torch.tensor(last, dtype=torch.int64))
        for slot in range(len(self.params.on_device.streams)):
            if slot < len(contents):
                self.params.set(slot, contents[slot])
            else:
                self.params.clear(slot)
        self.params.upload()

    def picker(self, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
        """A function (logits [size * rows, V], positions of the picked tokens) -> tokens; `rows` rows of each slot are
        adjacent."""
        scratch: dict[int, PickScratch] = {}
        sampling, tensors = self.sampling, self.tensors

        def choose(logits: Tensor, positions: Tensor) -> Tensor:
            width = logits.shape[1]
            if width not in scratch:
                scratch[width] = pick_scratch(self.size * rows, width, self.device)
            is_adjacent = rows == 1 or sampling == "greedy"
            spread = tensors if is_adjacent else tensors.map(lambda values: values.repeat_interleave(rows))
            return sample(logits, positions, spread, sampling, scratch[width])

        return choose


def sample(
    logits: Tensor,  # [R, V]
    positions: Tensor,  # [R] int64, of the sampled tokens
    params: SamplingTensors,  # by row
    sampling: Sampling,
    scratch: PickScratch,
) -> Tensor:
    """[R] int64: one token for each row."""
    if sampling == "greedy":
        return pick_greedy(logits, scratch)
    noise = params.temperature, params.streams, positions
    if sampling == "sampled":
        return pick(logits, *noise, scratch)
    return pick_truncated(logits, *noise, params.top_k, params.top_p, params.min_p, scratch, max_bytes=PICKING_BYTES)


class SlotTable:
    """Sequences by slot. There are no slots after the last one in use."""

    def __init__(self) -> None:
        self.sequences: list[Sequence | None] = []
        self.blocks: list[Seq[int]] = []
        """Block tables by slot: live views that grow."""
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._slots

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def members(self) -> list[Sequence]:
        """Sequences in slot order."""
        return [sequence for sequence in self.sequences if sequence is not None]

    def join(self, sequence: Sequence, blocks: Seq[int]) -> int:
        """Put the sequence into the lowest free slot."""
        if self._free:
            slot = heapq.heappop(self._free)
            self.sequences[slot], self.blocks[slot] = sequence, blocks
        else:
            slot = len(self.sequences)
            self.sequences.append(sequence)
            self.blocks.append(blocks)
        self._slots[sequence.id] = slot
        return slot

    def remove_ended(self) -> dict[int, Sequence]:
        """Empty the slots of sequences that no longer run, and return these by slot."""
        running = Status.RUNNING
        ended = {
            i: sequence
            for i, sequence in enumerate(self.sequences)
            if sequence is not None and sequence.status is not running
        }
        for slot, sequence in ended.items():
            del self._slots[sequence.id]
            self.sequences[slot], self.blocks[slot] = None, ()
            heapq.heappush(self._free, slot)
        if ended and self.sequences[-1] is None:
            while self.sequences and self.sequences[-1] is None:
                self.sequences.pop()
                self.blocks.pop()
            self._free = [slot for slot in self._free if slot < len(self.sequences)]
            heapq.heapify(self._free)
        return ended

    def clear(self) -> None:
        self.sequences, self.blocks, self._slots, self._free = [], [], {}, []
