"""Steps that the device runs one after another, submitted one step ahead of the host.

The executor runs steps that need nothing from the host: the device can sample the tokens of every sequence and make its drafts.
While the GPU computes one step, the host submits the next behind it. Sequences stay in their slots from step to step. Mixed
steps compute prompts beside them. For any other step the executor collects what is in flight and hands the sequences back to the
host executor. The tokens are the same either way: they depend on the model, the noise and the committed tokens alone.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.core.timeline import phase
from paceline.engine.executors.executor import StepResult
from paceline.engine.executors.graph.batch import IN_FLIGHT, GraphBatch
from paceline.engine.executors.graph.chain_drafter import ChainDrafter
from paceline.engine.executors.graph.draft_prefill import DraftPrefills, InflightPrefill
from paceline.engine.executors.graph.drafter import NO_DRAFTS, DraftShape, GraphProposer
from paceline.engine.executors.graph.eligibility import GraphEligibility
from paceline.engine.executors.graph.inflight import InflightStep
from paceline.engine.executors.graph.mixed import (
    MIXED_PROMPT_ROWS,
    Decoding,
    InflightMixed,
    MixedSteps,
    Prompt,
    prompt_budget,
)
from paceline.engine.executors.graph.slot_table import SlotTable
from paceline.engine.executors.graph.slots import DeviceSlots, Slot
from paceline.engine.executors.graph.warm_up import warm_up_passes
from paceline.engine.executors.reason import HostReason
from paceline.engine.hooks.idle_captures import IdleCaptures
from paceline.engine.schedule import Schedule
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.validator import RequestValidator
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.gpu.runner import GpuRunner, bucket, buckets
from paceline.speculation.depth.probing import SEQUENCES as PROBED
from paceline.speculation.proposers.draft_model import DraftModelProposer


@dataclass(frozen=True, slots=True)
class GraphSchedule(Schedule):
    """One committed token of every slot, with drafts of one shape. `items` are the prompts computed beside them."""

    shape: DraftShape = NO_DRAFTS
    num_ahead: int = 1
    """Tokens by which a sequence may have grown when the step ends, steps in flight included."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphDrafts:
    """What the graph needs to draft; the tokens themselves stay on the device. Lists are by slot."""

    limits: list[int | None]
    """Draft tokens granted; None: the slot is empty."""
    blocks: Seq[Seq[int]]
    """Blocks of the draft; empty where it gets none."""


class GraphExecutor:
    def __init__(
        self,
        runner: GpuRunner,
        proposer: GraphProposer | None,
        scheduler: Scheduler,
        speculator: Speculator,
        validator: RequestValidator,
        max_depth: int,
        clock: Clock,
    ) -> None:
        self._runner, self._proposer = runner, proposer
        self._scheduler, self._speculator, self._validator = scheduler, speculator, validator
        self._max_depth, self._clock = max_depth, clock
        self._device_slots = DeviceSlots(bucket(scheduler.max_num_seqs), runner.device)
        most = scheduler.max_batched_tokens
        self._mixed = MixedSteps(
            runner, self._device_slots, most, min(most, self._max_rows(self._device_slots.size)), IN_FLIGHT
        )
        self._prefills: DraftPrefills | None = None
        if isinstance(proposer, DraftModelProposer):
            self._prefills = DraftPrefills(proposer.drafter, self._device_slots.size)
        self._inflight_prefills: deque[InflightPrefill] = deque()
        self._batches: dict[int, GraphBatch] = {}
        self._batch = self._batch_of(1)
        """The batch that the slots are in, of the size that they need."""
        self._slots = SlotTable()
        self._inflight: deque[InflightStep | InflightMixed] = deque()
        self._eligibility = GraphEligibility(proposer, scheduler, speculator, validator)
        self._is_draining = False
        self.captures = IdleCaptures()
        """Graphs to capture in idle moments; a hook of the engine."""
        self.num_steps = 0
        """Steps collected."""
        self.last_result: StepResult | None = None
        """The newest step collected, for measurements."""

    def warm_up(self) -> None:
        """Compile the kernels of every pass and capture the graphs that any traffic needs. The others are captured in idle
        moments, or by the first step that needs one."""
        scheduler, runner = self._scheduler, self._runner
        batches = [self._batch_of(size) for size in reversed(buckets(scheduler.max_num_seqs))]
        most = max(batch.most_rows(self._max_depth, self._max_rows(batch.size)) for batch in batches)
        runner.workspace.logits(most)  # all batches share it
        warm_up_passes(
            runner,
            set(self._speculator.proposers.values()),
            scheduler.max_num_seqs,
            scheduler.max_batched_tokens,
            self._validator.limits.max_model_len,
            self.captures,
        )
        most_mixed = self._max_rows(self._device_slots.size) + MIXED_PROMPT_ROWS
        self._mixed.warm_up(min(scheduler.max_batched_tokens, most_mixed), self._max_depth if self._prefills else 0)
        if self._prefills is not None:
            self._prefills.warm_up()
        with phase("capture steps") as capturing:
            count = 0
            for batch in batches:
                first, later = batch.captures(self._max_depth, self._max_rows(batch.size))
                count += len(first)
                for capture in first:
                    capture()
                self.captures.add(later)
            capturing.note = f"{count} of {count + self.captures.num_waiting}"
        if runner.device.type == "cuda":  # a later capture would wait until this memory is returned
            torch.cuda.empty_cache()

    def _max_rows(self, size: int) -> int:
        """Most rows of a step of `size` slots, drafts included."""
        return min(self._scheduler.max_batched_tokens, size + self._scheduler.max_draft_tokens)

    @property
    def is_loaded(self) -> bool:
        """Whether the slots hold sequences."""
        return bool(self._slots)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    def schedule(self, can_prefill: bool = True) -> GraphSchedule | HostReason:
        """The next step, with its blocks reserved; or why the host executor has to take it. Loads the slots if they are empty.
        `can_prefill`: prompts may be computed here."""
        running = self._scheduler.running
        if not running:
            self.release()
            return HostReason.IDLE
        if self._slots:
            self._remove_ended()
            if not self._inflight_prompts and len(running) <= len(self._slots) // 2:
                return HostReason.RESIZE
        reason = self._eligibility.reason(running)
        if reason is not None:
            return reason
        if not self._slots:
            if self._inflight:  # of sequences that have ended, and of a prompt that is not complete
                return HostReason.PREFILL
            decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
            if not decoding:
                return HostReason.PREFILL
            if not can_prefill or any(sequence.depth for sequence in decoding):
                reason = self._host_prefill_reason(len(running) - len(decoding))
                if reason is not None:
                    return reason
            self._load_batch(decoding)
        has_prompts = self._has_prompts
        if has_prompts and not (can_prefill and self._can_join_batch):
            reason = self._host_prefill_reason(self._num_prompts)
            if reason is not None:
                return reason
            has_prompts = False  # they wait
        decoding = self._schedule_decoding(has_prompts)
        if isinstance(decoding, HostReason) or not has_prompts:
            return decoding
        return self._schedule_prompts(decoding)

    def _remove_ended(self) -> None:
        ended = self._slots.remove_ended()
        for slot in ended:
            self._device_slots.params.clear(slot)
        if ended and self._batch.drafter is not None:
            self._batch.drafter.forget([sequence.id for sequence in ended.values()])
        self._fit_batch()

    def _fit_batch(self) -> None:
        """Continue in a batch of the size that the slots need."""
        batch = self._batch_of(bucket(len(self._slots)))
        if batch is self._batch or not self._slots:
            return
        old, new = self._batch.drafter, batch.drafter
        if isinstance(old, ChainDrafter) and isinstance(new, ChainDrafter):
            new.take_over(old)
        elif new is not None:
            new.load(())  # its sequences need a draft prefill
        self._batch = batch

    def _host_prefill_reason(self, num_prompts: int) -> HostReason | None:
        """Why the host computes prompts now; None: there are none, or they wait. `num_prompts` sequences have begun theirs."""
        if num_prompts:
            return HostReason.PREFILL
        return HostReason.ADMISSION if self._eligibility.admits() else None

    @property
    def _num_prompts(self) -> int:
        """Running sequences with prompt tokens to submit."""
        inflight = self._inflight_prompts
        return sum([one not in self._slots and one.id not in inflight for one in self._scheduler.running])

    @property
    def _has_prompts(self) -> bool:
        return self._scheduler.may_admit or self._num_prompts > 0

    @property
    def _can_join_batch(self) -> bool:
        """Whether sequences can join without the host: what drafts can take them over, or nothing drafts."""
        drafter = self._batch.drafter
        if drafter is None or isinstance(drafter, ChainDrafter):
            return True
        return drafter.is_idle and not any(sequence.depth for sequence in self._slots.members())

    def _schedule_prompts(self, decoding: GraphSchedule) -> GraphSchedule | HostReason:
        """`decoding` with prompts beside it, or why the host has to take the step."""
        scheduler, num_decoding = self._scheduler, self._slots.num_used
        rows = num_decoding * (1 + decoding.shape.nodes)
        budget = min(prompt_budget(num_decoding, scheduler.prompt_rows), scheduler.max_batched_tokens - rows)
        prompts = scheduler.schedule_prompts(budget, self._can_join)
        if prompts:
            return replace(decoding, items=prompts)
        # The first that waits may need the host; otherwise it waits for blocks or for a prompt in flight
        needs_host = self._eligibility.reason(scheduler.waiting[:1]) is not None
        return (self._host_prefill_reason(0) if needs_host else None) or decoding

    def _can_join(self, sequence: Sequence) -> bool:
        return sequence.id not in self._inflight_prompts and self._eligibility.reason((sequence,)) is None

    def _schedule_decoding(self, has_prompts: bool) -> GraphSchedule | HostReason:
        """Decide the depths, choose the draft shape and reserve the target's blocks for the step."""
        members = self._slots.members()
        self._speculator.decide(members)
        batch = self._batch
        most_rows = self._max_rows(batch.size)
        if has_prompts:  # drafts leave them half a pass
            most_rows = min(most_rows, self._scheduler.max_batched_tokens // 2)
        drafter, most = batch.drafter, max(0, most_rows // batch.size - 1)
        for sequence in members:  # the host could not draft for it either: the batch stays in the graph
            if sequence.depth and drafter is not None and not drafter.has_room(sequence):
                sequence.depth = 0
        depth = min(most, max([sequence.depth for sequence in members]))
        if depth > 0 and (drafter is None or not drafter.can_draft(members)):
            return HostReason.DRAFT_BEHIND
        if depth > 0 and self._is_for_few(members):
            return HostReason.FEW_DRAFTS
        # The next larger shape may have too many rows for a pass
        shapes = (drafter.shape(less) for less in range(depth, 0, -1)) if drafter else ()
        shape = next((shape for shape in shapes if shape.nodes <= most), NO_DRAFTS)
        # A step computes its nodes, and commits a path of them and one token more
        num_ahead = self._num_inflight_tokens + shape.nodes + 1
        reason = self._reserve(members, num_ahead)
        return GraphSchedule((), (), shape, num_ahead) if reason is None else reason

    @property
    def _inflight_prompts(self) -> set[int]:
        """Sequences of which prompt tokens are in flight."""
        return {sequence_id for step in self._inflight for sequence_id in step.prompt_ids}

    @property
    def _num_inflight_tokens(self) -> int:
        """Tokens by which the steps in flight may extend a sequence."""
        return sum(step.max_tokens for step in self._inflight)

    def _reserve(self, members: Seq[Sequence], num_ahead: int) -> HostReason | None:
        """Reserve the target's blocks for `num_ahead` more tokens of every sequence."""
        lengths = [len(sequence.ids) for sequence in members]
        if max(lengths, default=0) + num_ahead > self._validator.limits.max_model_len:
            return HostReason.WINDOW
        grow = self._scheduler.tables.grow
        for slot, blocks in enumerate(self._slots.blocks):
            sequence = self._slots.sequences[slot]
            if sequence is not None:
                num_tokens = len(sequence.ids) + num_ahead
                if num_tokens > len(blocks) * BLOCK_SIZE and not grow(sequence.id, num_tokens):
                    return HostReason.BLOCKS
        return None

    def propose(self, schedule: GraphSchedule) -> GraphDrafts:
        """Draft limits and draft blocks of every slot. A sequence whose draft gets no blocks decodes plainly."""
        slots, drafter, shape = self._slots, self._batch.drafter, schedule.shape
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

    def submit(self, schedule: GraphSchedule, drafts: GraphDrafts) -> None:
        if schedule.items:
            self._submit_mixed(schedule, drafts)
        else:
            sequences, blocks = tuple(self._slots.sequences), self._slots.blocks
            step = self._batch.submit(schedule.shape, sequences, drafts.limits, blocks, drafts.blocks)
            self._inflight.append(step)
        self._speculator.graph_resumed()
        self._eligibility.num_steps += 1

    def _submit_mixed(self, schedule: GraphSchedule, drafts: GraphDrafts) -> None:
        """Queue the pass. A sequence whose prompt is complete is in a slot from the next step on."""
        slots, tables, batch, shape = self._slots, self._scheduler.tables, self._batch, schedule.shape
        begun = batch.begin(shape, drafts.limits, slots.blocks, drafts.blocks)
        decoding = [
            Decoding(slot, sequence, limit)
            for slot, (sequence, limit) in enumerate(zip(slots.sequences, drafts.limits, strict=True))
            if sequence is not None and limit is not None
        ]
        prompts = []
        for item in schedule.items:
            sequence, blocks, slot = item.sequence, tables.blocks(item.sequence.id), None
            if item.completes:
                slot = slots.join(sequence, blocks)
                self._device_slots.params.set(slot, Slot.of(sequence))
            prompts.append(Prompt(item, blocks, slot))
        self._inflight.append(self._mixed.submit(batch.inputs(shape), shape, begun, decoding, prompts))
        self._fit_batch()
        self._join_drafts([prompt.item.sequence for prompt in prompts if prompt.slot is not None])

    def _join_drafts(self, joining: Seq[Sequence]) -> None:
        """Queue the draft prefill of these sequences if others draft."""
        drafter = self._batch.drafter
        if not isinstance(drafter, ChainDrafter) or drafter.is_idle:
            return
        drafting = [sequence for sequence in joining if self._validator.max_depth(sequence) > 0]
        prefill = drafter.join(drafting) if drafting else None
        if prefill is not None:
            self._inflight_prefills.append(prefill)

    def collect(self) -> StepResult | None:
        """The older of two steps in flight; the last one too, if the executor is draining."""
        if len(self._inflight) < 2 and not (self._is_draining and self._inflight):
            return None
        step = self._inflight.popleft()
        self.num_steps += 1
        self.last_result = step.result(self._clock)
        while self._inflight_prefills and self._inflight_prefills[0].is_done:
            self._speculator.add_draft_prefill(DRAFT_MODEL, self._inflight_prefills.popleft().cost())
        return self.last_result

    def prepare_next(self, result: StepResult) -> None:
        if self._is_draining and not self._inflight:
            self.sync_to_host()

    def drain(self) -> None:
        """Submit nothing more: `collect` returns the step in flight, then the host executor continues."""
        self._is_draining = True

    def sync_to_host(self) -> None:
        """Hand the sequences back to the host executor. No step is in flight."""
        assert not self._inflight
        running = self._scheduler.running
        if running:
            self._speculator.graph_paused()
        for sequence in running:
            self._scheduler.tables.shrink(sequence.id, sequence.num_computed)
        if self._slots and (drafter := self._batch.drafter) is not None:
            drafter.return_sequences([sequence for sequence in running if sequence in self._slots])
        self.release()
        self._speculator.prepare_next(running, has_room=not self._scheduler.is_full)

    def release(self) -> None:
        """Empty the slots. Steps still in flight write only to blocks that later steps overwrite before reading."""
        while self._inflight:
            self._inflight.popleft().wait()
        self._slots.clear()
        self._inflight_prefills.clear()
        self._is_draining = False
        self._eligibility.forget()

    def yield_to_host(self) -> None:
        """The host executor takes the next step. If that step only prefills, no sequence drafts in it: the graph drafts
        cheaper, and it measures what drafting costs."""
        self._eligibility.num_steps = 0
        running = self._scheduler.running
        decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
        if self._eligibility.can_continue(running) and not self._is_for_few(decoding):
            for sequence in decoding:
                sequence.depth = 0

    def _is_for_few(self, decoding: Seq[Sequence]) -> bool:
        """Whether the ragged pass of the host is cheaper: a graph step has as many rows for every slot as for the deepest
        draft. A probe of one node stays in the graph: twice the rows cost less than leaving it."""
        depths = [sequence.depth for sequence in decoding if sequence.depth]
        if not depths or 2 * sum(depths) >= max(depths) * len(decoding):
            return False
        drafter = self._batch_of(bucket(len(decoding))).drafter
        is_small = drafter is not None and drafter.shape(max(depths)).nodes == 1
        return not (is_small and len(depths) <= PROBED)

    def _batch_of(self, size: int) -> GraphBatch:
        if size not in self._batches:
            self._batches[size] = GraphBatch(
                self._runner, self._proposer, self._prefills, self._device_slots, size, self._max_depth
            )
        return self._batches[size]

    def _load_batch(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._slots.join(sequence, self._scheduler.tables.blocks(sequence.id))
        self._device_slots.load([Slot.of(sequence) for sequence in sequences])
        self._batch = batch = self._batch_of(bucket(len(self._slots)))
        if batch.drafter is not None:
            prefill = batch.drafter.load(sequences)
            if prefill.tokens:
                method = next(sequence.method for sequence in sequences if sequence.depth)
                self._speculator.add_draft_prefill(method, prefill)
