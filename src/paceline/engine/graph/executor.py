"""Steps that the device runs one after another, submitted one step ahead of the host.

The executor runs steps that need nothing from the host: the device can sample the tokens of every sequence and make its drafts.
While the GPU computes one step, the host submits the next behind it. Sequences stay in their slots from step to step. A mixed
step computes prompts and the slots in one pass. For any other step the executor collects what is in flight and hands the
sequences back to the host executor. The tokens are the same either way: they depend on the model, the noise and the committed
tokens alone.

`BatchDrafts` decides what each slot may draft, and starts draft prefills that run at the same time as the step. The warm-up
compiles kernels and captures all graphs before the first request.
"""

from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from paceline.core.clock import Clock
from paceline.core.machine import phase, show_share
from paceline.core.sequence import Sequence
from paceline.engine import Scheduler, Speculator
from paceline.engine.graph.batch import IN_FLIGHT, Capture
from paceline.engine.graph.batches import GraphBatches
from paceline.engine.graph.chain_drafter import ChainDrafter
from paceline.engine.graph.drafter import GraphProposer
from paceline.engine.graph.eligibility import GraphEligibility
from paceline.engine.graph.inflight import InflightStep
from paceline.engine.graph.mixed import Decoding, InflightMixed, MixedSteps, ScheduledPrompt
from paceline.engine.graph.scheduler import GraphSchedule, GraphScheduler, SubmitPacer
from paceline.engine.graph.slot_params import Slot
from paceline.engine.graph.slots import DeviceSlots, SlotTable
from paceline.engine.step.step import HostReason, Schedule, StepDrafts, StepResult
from paceline.kernels.gpu.compilation import count_lookups
from paceline.models.device import StreamEvent
from paceline.models.heads.eagle import EagleRunner
from paceline.models.runner.gpu import GpuRunner, PassKind, PassLimits
from paceline.policy.depth.prompt_load import MANY_ROWS
from paceline.policy.step import MIXED_PROMPT_ROWS, padded_size
from paceline.requests import RequestValidator
from paceline.speculation import HiddenRequest, Proposer


@dataclass(frozen=True, slots=True, eq=False)
class GraphDrafts(StepDrafts):
    """What the graph needs to draft; the tokens themselves stay on the device. Lists are by slot."""

    limits: list[int | None]
    """Draft tokens granted. None if the slot is empty."""
    blocks: Seq[Seq[int]]
    """Blocks of the draft; empty where it gets none."""


class BatchDrafts:
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


def warm_up_passes(
    target: GpuRunner,
    proposers: Collection[Proposer],
    max_num_seqs: int,
    max_rows: int,
    window: int,
) -> None:
    """Load the kernels of every pass of the target and of the drafts, and capture their graphs."""
    kinds = frozenset(pass_kinds(proposers))
    captures: list[Capture] = []
    with phase("load kernels") as loading:
        counts = count_lookups()
        for runner, limits in _runners(target, proposers, PassLimits(max_num_seqs, max_rows, window, kinds)):
            if isinstance(runner, EagleRunner):
                runner.warm_up(limits.max_num_seqs, limits.max_rows, limits.longest)
                continue
            runner.load_kernels(limits)
            captures.extend(runner.captures(limits))
        loading.note = f"{counts.hits} in the cache, {counts.misses} compiled"
    capture_all("passes", captures)


def capture_all(name: str, captures: Seq[Capture]) -> None:
    with phase(f"capture {name}") as capturing:
        for number, capture in enumerate(captures):
            show_share(number / len(captures))
            capture()
        capturing.note = f"{len(captures)} graphs"


def _runners(
    target: GpuRunner, proposers: Collection[Proposer], limits: PassLimits
) -> Iterator[tuple[GpuRunner | EagleRunner, PassLimits]]:
    """The runners of the target and of the drafts, with the limits of their passes."""
    yield target, limits
    plain = frozenset({PassKind()})
    for runner in dict.fromkeys(runner for proposer in proposers for runner in proposer.traits.runners):
        if isinstance(runner, GpuRunner) and runner.cache[0] is target.cache[0]:
            # Layers of the target draft one row of a sequence at a time
            yield runner, PassLimits(limits.max_num_seqs, limits.max_num_seqs, 1, plain)
        elif isinstance(runner, GpuRunner | EagleRunner):
            yield runner, PassLimits(limits.max_num_seqs, limits.max_rows, limits.longest, plain)


def pass_kinds(proposers: Collection[Proposer]) -> set[PassKind]:
    """The kinds of passes that the target computes for these proposers."""
    kinds = {PassKind()}
    for proposer in proposers:
        wants = proposer.traits.hidden or HiddenRequest()
        states = tuple(sorted(wants.layers)), wants.last
        kinds |= {PassKind(is_tree, *states) for is_tree in {False, proposer.traits.is_tree}}
    return kinds


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
        self._runner, self._scheduler, self._speculator, self._validator = runner, scheduler, speculator, validator
        self._clock = clock
        self._slots = SlotTable()
        vocab_size = runner.model.config.vocab_size
        self._device_slots = DeviceSlots(padded_size(scheduler.max_num_seqs), runner.device, vocab_size=vocab_size)
        self._batches = GraphBatches(runner, proposer, scheduler, max_depth, self._device_slots, self._slots)
        most, most_decoding = scheduler.max_batched_tokens, self._batches.max_rows(self._device_slots.size)
        self._mixed = MixedSteps(runner, self._device_slots, most, most_decoding, IN_FLIGHT)
        self._inflight: deque[InflightStep | InflightMixed] = deque()
        self._drafts = BatchDrafts(self._slots, self._batches, validator)
        self._eligibility = GraphEligibility(proposer, scheduler, speculator, validator)
        self._steps = GraphScheduler(
            scheduler,
            speculator,
            self._eligibility,
            self._slots,
            self._batches,
            self._inflight,
            validator,
        )
        self._is_draining = False
        self._is_holding = False
        """Whether nothing is submitted until the step in flight is collected."""
        self._pacer = SubmitPacer()
        self._scheduled, self._running_since = clock.now(), clock.now()
        """When the host began to schedule the newest step, and when the device began the oldest in flight."""
        self.num_steps = 0
        """Steps collected."""
        self.last_result: StepResult | None = None
        """The newest step collected, for measurements."""

    def warm_up(self) -> None:
        """Compile the kernels of every pass and capture all graphs: no request waits for one."""
        scheduler, batches = self._scheduler, self._batches
        most_mixed = min(scheduler.max_batched_tokens, batches.max_rows(self._device_slots.size) + MIXED_PROMPT_ROWS)
        warm_up_passes(
            self._runner,
            set(self._speculator.proposers.values()),
            scheduler.max_num_seqs,
            scheduler.max_batched_tokens,
            self._validator.limits.max_model_len,
        )
        self._mixed.warm_up(most_mixed, batches.max_depth if batches.prefills else 0)
        captures = batches.captures()
        if batches.prefills is not None:
            batches.prefills.warm_up()
            captures += self._mixed.captures()
        capture_all("steps", captures)
        if self._runner.device.type == "cuda":  # a later capture would wait until this memory is returned
            torch.cuda.empty_cache()

    def draft_seconds(self, size: int) -> dict[int, float]:
        """{draft tokens of a sequence: seconds of drafting} in steps of about `size` sequences. The slots are empty."""
        return self._batches.draft_seconds(size)

    @property
    def is_loaded(self) -> bool:
        """Whether the slots hold sequences."""
        return bool(self._slots)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    @property
    def seconds_to_spare(self) -> float:
        """How long the host can wait for requests before it submits the next step."""
        if len(self._inflight) != 1 or self._runner.device.type != "cuda":
            return 0.0
        running_for = self._clock.now() - self._running_since
        return self._pacer.seconds_to_spare(self._inflight[0].kind, running_for, self._scheduler.may_admit)

    def schedule(self, can_prefill: bool = True) -> GraphSchedule | HostReason | None:
        """The next step, with its blocks reserved, or the reason why the host executor has to take it. Loads the slots if they
        are empty. Returns None if the step in flight may end all sequences, so that it is collected first. `can_prefill` is
        true if this executor may compute prompts."""
        self._scheduled = self._clock.now()
        running = self._scheduler.running
        if not running:
            self.release()
            return HostReason.IDLE
        if self._slots:
            self._remove_ended()
            if not self._steps.inflight_prompts and len(running) <= len(self._slots) // 2:
                return HostReason.RESIZE
        reason = self._eligibility.reason(running)
        if reason is not None:
            return reason
        if not self._slots:
            if self._inflight:  # of sequences that have ended, and of a prompt that is not complete
                return HostReason.PREFILL
            decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
            self._eligibility.skip_rejection(decoding)
            reason = self._steps.load_reason(decoding, can_prefill)
            if reason is not None:
                return reason
            self._load_batch(decoding)
        if self._steps.may_all_end:
            self._is_holding = True
            return None
        return self._steps.schedule(can_prefill)

    def _remove_ended(self) -> None:
        ended = self._slots.remove_ended()
        for slot in ended:
            self._device_slots.params.clear(slot)
        if ended and self._batches.current.drafter is not None:
            self._batches.current.drafter.forget([sequence.id for sequence in ended.values()])
        self._batches.fit()

    def propose(self, schedule: Schedule) -> GraphDrafts:
        """Draft limits and draft blocks of every slot. A sequence whose draft gets no blocks decodes plainly."""
        assert isinstance(schedule, GraphSchedule)
        return self._drafts.reserve(schedule)

    def submit(self, schedule: Schedule, drafts: StepDrafts) -> None:
        assert isinstance(schedule, GraphSchedule)
        assert isinstance(drafts, GraphDrafts)
        batch = self._batches.current
        self._drafts.order_after_prefill()
        num_graphs = batch.num_graphs
        if schedule.items:
            self._submit_mixed(schedule, drafts)
        else:
            sequences, blocks = tuple(self._slots.sequences), self._slots.blocks
            step = batch.submit(schedule.shape, sequences, drafts.limits, blocks, drafts.blocks)
            is_timed = step.is_timed and not schedule.catching_up  # the draft prefill at the same time slows it down
            self._inflight.append(replace(step, is_timed=is_timed))
            self._drafts.catch_up(schedule.catching_up, step.buffers.drafted, len(self._inflight) - 1)
        now = self._clock.now()
        if batch.num_graphs == num_graphs:
            self._pacer.observe_submit(bool(schedule.items), now - self._scheduled)
        if len(self._inflight) == 1:
            self._running_since = now
        self._speculator.graph_resumed()
        self._eligibility.num_steps += 1

    def _submit_mixed(self, schedule: GraphSchedule, drafts: GraphDrafts) -> None:
        """Queue the pass. A sequence whose prompt is complete is in a slot from the next step on."""
        slots, tables, batch, shape = self._slots, self._scheduler.tables, self._batches.current, schedule.shape
        num_graphs = batch.num_graphs
        begun = batch.begin(shape, drafts.limits, slots.blocks, drafts.blocks)
        is_timed = batch.num_graphs == num_graphs
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
            prompts.append(ScheduledPrompt(item, blocks, slot))
        step = self._mixed.submit(batch.inputs(shape), shape, begun, decoding, prompts, is_timed)
        self._inflight.append(step)
        self._drafts.catch_up(schedule.catching_up, begun.drafted, len(self._inflight) - 1)
        self._batches.fit()
        # A probe drafts for few sequences: those that join need no draft prefill for it. A large one would delay other prompts
        is_drafting = 2 * sum([bool(entry.limit) for entry in decoding]) >= len(decoding)
        if is_drafting and schedule.num_tokens < MANY_ROWS:
            self._drafts.join([prompt.item.sequence for prompt in prompts if prompt.slot is not None], begun.drafted)

    def collect(self) -> StepResult | None:
        """The older of two steps in flight; the last one too, if nothing is submitted behind it."""
        if len(self._inflight) < 2 and not ((self._is_draining or self._is_holding) and self._inflight):
            return None
        step = self._inflight.popleft()
        self.num_steps += 1
        self._is_holding = False
        result = self.last_result = step.result(self._clock)
        self._running_since = self._clock.now()
        if result.is_timed:
            self._pacer.observe_step(step.kind, result.verify_seconds + (result.draft_seconds or 0.0))
        return result

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
        if self._slots and (drafter := self._batches.current.drafter) is not None:
            drafter.return_sequences([sequence for sequence in running if sequence in self._slots])
        self.release()
        rows = self._scheduler.prompt_rows()
        self._speculator.prepare_next(running, has_room=not self._scheduler.is_full(rows), prompt_rows=rows)

    def release(self) -> None:
        """Empty the slots. Steps still in flight write only to blocks that later steps overwrite before reading."""
        while self._inflight:
            self._inflight.popleft().wait()
        self._drafts.wait()
        self._slots.clear()
        self._is_draining = self._is_holding = False
        self._eligibility.forget()

    def yield_to_host(self) -> None:
        """The host executor takes the next step."""
        self._eligibility.num_steps = 0
        self._steps.postpone_drafts()

    def _load_batch(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._slots.join(sequence, self._scheduler.tables.blocks(sequence.id))
        self._device_slots.load([Slot.of(sequence) for sequence in sequences])
        batch = self._batches.load()
        if batch.drafter is not None:
            prefill = batch.drafter.load(sequences)
            if prefill.tokens:
                method = next(sequence.method for sequence in sequences if sequence.depth)
                self._speculator.add_draft_prefill(method, prefill)
