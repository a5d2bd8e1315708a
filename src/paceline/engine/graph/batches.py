"""The batches of all sizes, and the one that the slots are in."""

from typing import cast

from paceline.engine import Scheduler
from paceline.engine.graph.batch import Capture, GraphBatch
from paceline.engine.graph.chain_drafter import ChainDrafter
from paceline.engine.graph.drafter import DraftPrefills, GraphProposer
from paceline.engine.graph.slots import DeviceSlots, SlotTable
from paceline.models.runner.gpu import GpuRunner, padded_sizes
from paceline.policy.step import padded_size
from paceline.speculation.proposers.model import DraftModelProposer


class GraphBatches:
    """A batch is made when its size is needed first, and kept: it has its own graphs."""

    def __init__(
        self,
        runner: GpuRunner,
        proposer: GraphProposer | None,
        scheduler: Scheduler,
        max_depth: int,
        device_slots: DeviceSlots,
        slots: SlotTable,
    ) -> None:
        self._runner, self._proposer, self._scheduler = runner, proposer, scheduler
        self._device_slots, self._slots, self.max_depth = device_slots, slots, max_depth
        self.prefills: DraftPrefills | None = None
        if proposer is not None and not proposer.traits.is_tree:
            self.prefills = DraftPrefills(cast(DraftModelProposer, proposer).drafter, device_slots.size)
        self.can_join = proposer is None or self.prefills is not None
        """Whether sequences can join a batch that drafts, without the host."""
        self._batches: dict[int, GraphBatch] = {}
        self.current = self.of(1)
        """The batch of the size that the slots need."""

    def of(self, size: int) -> GraphBatch:
        if size not in self._batches:
            self._batches[size] = GraphBatch(
                self._runner, self._proposer, self.prefills, self._device_slots, size, self.max_depth
            )
        return self._batches[size]

    def max_rows(self, size: int) -> int:
        """Most rows of a step of `size` slots, drafts included."""
        return min(self._scheduler.max_batched_tokens, size + self._scheduler.max_draft_tokens)

    def captures(self) -> list[Capture]:
        """Functions that capture the graphs of all batches."""
        batches = [self.of(size) for size in reversed(padded_sizes(self._scheduler.max_num_seqs))]
        most = max(batch.most_rows(self.max_depth, self.max_rows(batch.size)) for batch in batches)
        self._runner.workspace.logits(most)  # all batches share it
        captures = [
            capture for batch in batches for capture in batch.captures(self.max_depth, self.max_rows(batch.size))
        ]
        return [*captures, batches[-1].load_features]

    def draft_seconds(self, size: int) -> dict[int, float]:
        """{draft tokens of a sequence: seconds of drafting} in steps of about `size` sequences."""
        batch = self.of(padded_size(size))
        shapes = batch.shapes(self.max_depth, self.max_rows(batch.size))
        return {shape.nodes: batch.draft_seconds(shape) for shape in shapes if shape.nodes}

    def load(self) -> GraphBatch:
        """The batch for sequences that were just put into the slots; its drafter has not loaded them."""
        self.current = self.of(padded_size(len(self._slots)))
        return self.current

    def fit(self) -> None:
        """Continue in a batch of the size that the slots need."""
        batch = self.of(padded_size(len(self._slots)))
        if batch is self.current or not self._slots:
            return
        old, new = self.current.drafter, batch.drafter
        if isinstance(old, ChainDrafter) and isinstance(new, ChainDrafter):
            new.take_over(old)
        elif new is not None:
            new.load(())  # its sequences need a draft prefill
        self.current = batch
