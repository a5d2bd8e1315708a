"""Drafts of a graph step: what each slot may draft, and draft prefills that run at the same time as the step."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.core.sequence import Sequence
from paceline.engine.executors.graph.batches import GraphBatches
from paceline.engine.executors.graph.drafters.chain_drafter import ChainDrafter
from paceline.engine.executors.graph.graph_scheduler import GraphSchedule
from paceline.engine.executors.graph.slot_table import SlotTable
from paceline.engine.validator import RequestValidator
from paceline.models.cuda_graph import StreamEvent


@dataclass(frozen=True, slots=True, eq=False)
class GraphDrafts:
    """What the graph needs to draft; the tokens themselves stay on the device. Lists are by slot."""

    limits: list[int | None]
    """Draft tokens granted. None if the slot is empty."""
    blocks: Seq[Seq[int]]
    """Blocks of the draft; empty where it gets none."""


class StepDrafts:
    """The drafts of the current batch. The draft model is in use until the newest draft prefill has ended."""

    def __init__(self, slots: SlotTable, batches: GraphBatches, validator: RequestValidator) -> None:
        self._slots, self._batches, self._validator = slots, batches, validator
        self._prefilled: StreamEvent | None = None
        """End of the newest draft prefill."""

    def reserve(self, schedule: GraphSchedule) -> GraphDrafts:
        """Draft limits and draft blocks of every slot. A sequence whose draft gets no blocks decodes plainly."""
        slots, drafter, shape = self._slots, self._batches.current.drafter, schedule.shape
        if drafter is None or drafter.is_idle:
            limits = [None if sequence is None else 0 for sequence in slots.sequences]
            return GraphDrafts(limits, ())
        drafts = GraphDrafts([], draft_blocks := [])
        for sequence in slots.sequences:
            blocks = None
            if sequence is not None:
                blocks = drafter.reserve_blocks(sequence, len(sequence.ids) + schedule.num_ahead, shape)
            drafts.limits.append(None if sequence is None else min(sequence.depth, shape.nodes) if blocks else 0)
            draft_blocks.append(blocks or ())
        return drafts

    def catch_up(self, behind: Seq[Sequence], drafted: StreamEvent, num_unknown: int) -> None:
        """Queue the draft prefill of these sequences. It runs at the same time as the step just submitted, which they are in.
        `num_unknown` is the number of steps in flight before it."""
        drafter = self._batches.current.drafter
        if behind and isinstance(drafter, ChainDrafter):
            self._prefilled = drafter.join(behind, drafted, num_unknown=num_unknown)

    def join(self, joining: Seq[Sequence], drafted: StreamEvent) -> None:
        """Queue the draft prefill of these sequences, which join a batch that drafts. It runs at the same time as the target's
        pass, after `drafted`."""
        drafter = self._batches.current.drafter
        if not isinstance(drafter, ChainDrafter) or drafter.is_idle:
            return
        drafting = [sequence for sequence in joining if self._validator.max_depth(sequence) > 0]
        if drafting:
            self._prefilled = drafter.join(drafting, drafted) or self._prefilled

    def order_after_prefill(self) -> None:
        """Make the device start the next step after the newest draft prefill; the host does not wait."""
        if self._prefilled is not None:
            self._prefilled.block()
            self._prefilled = None

    def wait(self) -> None:
        """Wait for the newest draft prefill."""
        if self._prefilled is not None:
            self._prefilled.wait()
            self._prefilled = None
