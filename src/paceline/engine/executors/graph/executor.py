"""Decoding steps as CUDA graphs, submitted one step ahead of the host.

The executor runs steps that need nothing from the host: every sequence decodes, and the device can sample its tokens and make
its drafts. While the GPU computes one step, the host submits the next behind it. For any other step the executor collects what
is in flight and hands the sequences back to the host executor. The tokens are the same either way: they depend on the model,
the noise and the committed tokens alone.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache

import torch

from paceline.core.clock import Clock
from paceline.core.output import StepTimes
from paceline.core.sequence import Origin, Sequence, Status
from paceline.engine.executors.executor import SequenceResult, StepResult
from paceline.engine.executors.graph.batch import GraphBatch
from paceline.engine.executors.graph.drafter import NO_DRAFTS, DraftShape, GraphProposer
from paceline.engine.executors.graph.eligibility import GraphEligibility
from paceline.engine.executors.graph.inflight import InflightStep
from paceline.engine.executors.graph.slots import Slot
from paceline.engine.executors.graph.warm_up import warm_up_passes
from paceline.engine.executors.reason import HostReason
from paceline.engine.schedule import Schedule, Scheduled
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.validator import RequestValidator
from paceline.models.gpu.runner import GpuRunner, bucket, buckets
from paceline.speculation.depth.probing import SEQUENCES as PROBED
from paceline.speculation.verification.verify import PLAIN, Verdict


@dataclass(frozen=True, slots=True)
class GraphSchedule(Schedule):
    """One committed token of every running sequence, and drafts of one shape for all slots."""

    shape: DraftShape = NO_DRAFTS
    num_ahead: int = 0
    """Tokens by which a sequence may have grown when the step ends, steps in flight included."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphDrafts:
    """What the graph needs to draft; the tokens themselves stay on the device. Lists are by slot."""

    limits: list[int | None]
    """Draft tokens granted; None: the slot is empty."""
    blocks: list[Seq[int]]
    draft_blocks: list[Seq[int]]


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
        self._batches: dict[int, GraphBatch] = {}
        self._slots: list[Sequence] = []
        self._loaded: set[int] = set()
        self._inflight: deque[InflightStep] = deque()
        self._eligibility = GraphEligibility(proposer, scheduler, speculator, validator)
        self._is_draining = False
        self.num_steps = 0
        """Steps collected."""
        self.last_result: StepResult | None = None
        """The newest step collected, for measurements."""

    def warm_up(self) -> None:
        """Compile the kernels of every pass and capture the graphs of every step, so that no request waits for it."""
        scheduler, runner = self._scheduler, self._runner
        limits = self._max_depth, scheduler.max_batched_tokens
        batches = [self._batch_of(size) for size in reversed(buckets(scheduler.max_num_seqs))]
        runner.workspace.logits(max(batch.most_rows(*limits) for batch in batches))  # all batches share it
        warm_up_passes(
            runner,
            set(self._speculator.proposers.values()),
            scheduler.max_num_seqs,
            scheduler.max_batched_tokens,
            self._validator.limits.max_model_len,
        )
        for batch in batches:
            batch.warm_up(*limits)
        if runner.device.type == "cuda":  # a later capture would wait until this memory is returned
            torch.cuda.empty_cache()

    @property
    def is_loaded(self) -> bool:
        """Whether the slots hold sequences."""
        return bool(self._slots)

    @property
    def num_inflight(self) -> int:
        return len(self._inflight)

    def schedule(self) -> GraphSchedule | HostReason:
        """The next step, with its blocks reserved; or why the host executor has to take it. Loads the batch if needed."""
        running = self._scheduler.running
        if not running:
            self.release()
            return HostReason.IDLE
        if self._slots and (
            len(running) <= len(self._slots) // 2 or not all(sequence.id in self._loaded for sequence in running)
        ):
            return HostReason.RESIZE
        reason = self._eligibility.reason(running)
        if reason is not None:
            return reason
        if not self._slots:
            self._load_batch(running)
        return self._reserve(running)

    def propose(self, schedule: GraphSchedule) -> GraphDrafts:
        """Blocks of every slot for the target and the draft. A sequence whose draft gets no blocks decodes plainly."""
        drafter, shape = self._batch.drafter, schedule.shape
        drafts = GraphDrafts([], [], [])
        tables, running = self._scheduler.tables, Status.RUNNING
        for sequence in self._slots:
            if sequence.status is not running:
                drafts.limits.append(None)
                drafts.blocks.append(())
                drafts.draft_blocks.append(())
                continue
            num_tokens = len(sequence.ids) + schedule.num_ahead
            blocks = drafter.reserve_blocks(sequence, num_tokens, shape) if drafter else None
            drafts.limits.append(min(sequence.depth, shape.nodes) if blocks else 0)
            drafts.blocks.append(tables.blocks(sequence.id))
            drafts.draft_blocks.append(blocks or ())
        return drafts

    def submit(self, schedule: GraphSchedule, drafts: GraphDrafts) -> None:
        step = self._batch.submit(schedule.shape, drafts.limits, drafts.blocks, drafts.draft_blocks)
        self._inflight.append(step)
        self._speculator.graph_resumed()
        self._eligibility.num_steps += 1

    def collect(self) -> StepResult | None:
        """The older of two steps in flight; the last one too, if the executor is draining."""
        if len(self._inflight) < 2 and not (self._is_draining and self._inflight):
            return None
        step = self._inflight.popleft()
        outcome = step.wait()
        sequences, context = [], 0
        for slot, (sequence, limit) in enumerate(zip(self._slots, step.limits, strict=True)):
            if limit is None or sequence.status is not Status.RUNNING:  # it finished while the step was in flight
                continue
            accepted = outcome.accepted[slot]
            context += len(sequence.ids)
            verdict = Verdict(
                outcome.paths[slot],
                tuple(outcome.tokens[slot][: accepted + 1]),
                _origins(accepted, outcome.is_bonus[slot]) if limit else PLAIN,
            )
            sequences.append(SequenceResult(sequence, 1, verdict, limit, limit, outcome.levels[slot] if limit else 0))
        slots, now = self._batch.size, self._clock.now()
        verify_seconds = outcome.forward_seconds + outcome.sample_seconds
        drafted = now - verify_seconds
        self.num_steps += 1
        self.last_result = StepResult(
            sequences=sequences,
            times=StepTimes(drafted - outcome.draft_seconds, drafted, now),
            forward_seconds=outcome.forward_seconds,
            verify_seconds=verify_seconds,
            rows=slots * (step.shape.nodes + 1),
            context=context,
            draft_seconds=outcome.draft_seconds,
            slots=slots,
            is_timed=step.is_timed,
        )
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
        if (drafter := self._batch.drafter) is not None:
            drafter.return_sequences([sequence for sequence in running if sequence.id in self._loaded])
        self.release()
        self._speculator.prepare_next(running, has_room=not self._scheduler.is_full)

    def release(self) -> None:
        """Empty the slots. Steps still in flight write only to blocks that later steps overwrite before reading."""
        while self._inflight:
            self._inflight.popleft().wait()
        self._slots, self._loaded = [], set()
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

    def _reserve(self, running: Seq[Sequence]) -> GraphSchedule | HostReason:
        """Decide the depths, choose the draft shape and reserve the target's blocks for the step."""
        self._speculator.decide(running)
        batch = self._batch
        drafter, most = batch.drafter, self._scheduler.max_batched_tokens // batch.size - 1
        for sequence in running:  # the host could not draft for it either: the batch stays in the graph
            if sequence.depth and drafter is not None and not drafter.has_room(sequence):
                sequence.depth = 0
        depth = min(most, max([sequence.depth for sequence in running]))
        if depth > 0 and (drafter is None or not drafter.can_draft(running)):
            return HostReason.DRAFT_BEHIND
        if depth > 0 and self._is_for_few(running):
            return HostReason.FEW_DRAFTS
        # The next larger shape may have too many rows for a pass
        shapes = (drafter.shape(less) for less in range(depth, 0, -1)) if drafter else ()
        shape = next((shape for shape in shapes if shape.nodes <= most), NO_DRAFTS)
        # A step computes its nodes, and commits a path of them and one token more
        num_ahead = sum(step.shape.levels + 1 for step in self._inflight) + shape.nodes + 1
        if max([len(s.ids) for s in running]) + num_ahead > self._validator.limits.max_model_len:
            return HostReason.WINDOW
        tables = self._scheduler.tables
        if not all(tables.grow(s.id, len(s.ids) + num_ahead) for s in running):
            return HostReason.BLOCKS
        items = tuple([Scheduled(s, 1, min(s.depth, shape.nodes)) for s in running])
        return GraphSchedule(items, (), shape, num_ahead)

    def _is_for_few(self, decoding: Seq[Sequence]) -> bool:
        """Whether the ragged pass of the host is cheaper: a graph step has as many rows for every slot as for the deepest
        draft. A probe of one node stays in the graph: twice the rows cost less than leaving it."""
        depths = [sequence.depth for sequence in decoding if sequence.depth]
        if not depths or 2 * sum(depths) >= max(depths) * len(decoding):
            return False
        drafter = self._batch_of(bucket(len(decoding))).drafter
        is_small = drafter is not None and drafter.shape(max(depths)).nodes == 1
        return not (is_small and len(depths) <= PROBED)

    @property
    def _batch(self) -> GraphBatch:
        """The batch of the size that the slots need."""
        return self._batch_of(bucket(len(self._slots)))

    def _batch_of(self, size: int) -> GraphBatch:
        if size not in self._batches:
            self._batches[size] = GraphBatch(self._runner, self._proposer, size, self._max_depth)
        return self._batches[size]

    def _load_batch(self, running: Seq[Sequence]) -> None:
        self._slots, self._loaded = list(running), {sequence.id for sequence in running}
        batch = self._batch
        batch.load([Slot(s.ids, s.sampling, s.seed, s.choice) for s in self._slots])
        if batch.drafter is not None:
            prefill = batch.drafter.load(self._slots)
            if prefill.tokens:
                method = next(sequence.method for sequence in running if sequence.depth)
                self._speculator.add_draft_prefill(method, prefill)


@cache
def _origins(accepted: int, is_bonus: bool) -> tuple[Origin, ...]:
    """Origins of the tokens of a step with drafts."""
    return (*(Origin.ACCEPTED,) * accepted, Origin.BONUS if is_bonus else Origin.RECOVERED)
