"""The slots of a batch on the device: which sequence is in which slot, and the state of each slot.

`DeviceSlots` holds lengths and last tokens by slot, picks tokens with the parameters of the slots (`slot_params.py`), and
counts and scores those that are committed. `SlotTable` assigns the sequences of the graph executor to slots.
"""

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.core.sequence import Sequence, Status
from paceline.engine.graph.slot_params import Sampling, SamplingTensors, Slot, SlotParams
from paceline.kernels.gpu.speculation.accept import DeviceState
from paceline.kernels.gpu.speculation.edits import DraftedRows, count_tokens, edit_logits
from paceline.kernels.gpu.speculation.pick import PickScratch, pick, pick_greedy, pick_scratch
from paceline.kernels.gpu.speculation.pick_truncated import pick_truncated
from paceline.kernels.gpu.speculation.scores import ScoreScratch, score_scratch, score_tokens


class DeviceSlots:
    """The state of the first `size` slots. Batches of different sizes share the memory of the largest."""

    def __init__(
        self, size: int, device: torch.device, largest: "DeviceSlots | None" = None, vocab_size: int = 0
    ) -> None:
        """`largest` holds the slots of the largest batch. If None, these are the slots of the largest batch, and they are
        empty. `vocab_size` is needed for penalties."""
        self.size, self.device = size, device
        if largest is None:
            # Empty slots are greedy sequences of two tokens
            lengths = torch.full((size,), 2, dtype=torch.int32, device=device)
            self.state = DeviceState(lengths, torch.zeros(size, 2, dtype=torch.int64, device=device))
            self.params = SlotParams(size, device, vocab_size)
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

    def picker(self, rows: int, sampling: Sampling) -> Callable[[Tensor, Tensor, DraftedRows | None], Tensor]:
        """A function (logits [size * rows, V], positions of the picked tokens, drafts before the rows) -> tokens; `rows` rows
        of each slot are adjacent. It may modify the logits, unless they are scored."""
        scratch: dict[int, PickScratch] = {}
        tensors = self.tensors

        def choose(logits: Tensor, positions: Tensor, drafted: DraftedRows | None) -> Tensor:
            width = logits.shape[1]
            if width not in scratch:
                scratch[width] = pick_scratch(self.size * rows, width, self.device)
            is_adjacent = rows == 1 or sampling.kind == "greedy"
            spread = tensors if is_adjacent else tensors.map(lambda values: values.repeat_interleave(rows))
            logits = self.edited(logits, positions, sampling, each=rows, drafted=drafted)
            return sample(logits, positions, spread, sampling, scratch[width])

        return choose

    def edited(
        self,
        logits: Tensor,  # [R, V]
        positions: Tensor,  # [R]
        sampling: Sampling,
        slots: Tensor | None = None,
        each: int = 1,
        drafted: DraftedRows | None = None,
    ) -> Tensor:
        """The logits with the modifications of their slots, in place unless they are scored; see `edit_logits`."""
        if sampling.is_edited:
            logits = logits.clone() if sampling.is_scored else logits
            edit_logits(logits, positions, self.params.edits, slots, each, drafted)
        return logits

    def count(self, tokens: Tensor, sampling: Sampling, slots: Tensor | None = None) -> None:
        """Count committed tokens [B, W] for the penalties of their slots; see `count_tokens`."""
        if sampling.is_edited:
            count_tokens(tokens, self.params.edits, slots)

    def scorer(self, num_tokens: int) -> Callable[..., None]:
        """`score_tokens` for up to so many tokens, with the wants of the slots. The arguments are logits, rows, tokens, tokens
        of a slot, `out` and `slots`."""
        scratch: list[ScoreScratch] = []

        def score(
            logits: Tensor, rows: Tensor, tokens: Tensor, each: int, out: Tensor, slots: Tensor | None = None
        ) -> None:
            if not scratch:
                scratch.append(score_scratch(num_tokens, logits.shape[1], self.device))
            score_tokens(logits, rows, tokens, self.params.num_top, each, scratch[0], out, slots)

        return score


def sample(
    logits: Tensor,  # [R, V]
    positions: Tensor,  # [R] int64, of the sampled tokens
    params: SamplingTensors,  # by row
    sampling: Sampling,
    scratch: PickScratch,
) -> Tensor:
    """[R] int64: one token for each row."""
    if sampling.kind == "greedy":
        return pick_greedy(logits, scratch)
    noise = params.temperature, params.streams, positions
    if sampling.kind == "sampled":
        return pick(logits, *noise, scratch)
    return pick_truncated(logits, *noise, params.top_k, params.top_p, params.min_p)


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
