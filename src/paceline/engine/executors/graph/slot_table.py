"""Which sequence is in which slot of the graph executor."""

import heapq
from collections.abc import Sequence as Seq

from paceline.core.sequence import Sequence, Status


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
