"""Steps that compute prompts and the decoding slots in one pass, which the host does not wait for."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.output import StepTimes
from paceline.core.sequence import BLOCK_SIZE, Sequence, Status
from paceline.engine.graph.drafter import DraftShape
from paceline.engine.graph.inflight import StepBuffers, add_scores, chain_path, origins
from paceline.engine.graph.slot_params import WARM_UP_ALL, WARM_UP_SAMPLING, Slot
from paceline.engine.graph.slots import DeviceSlots, sample
from paceline.engine.step.step import Scheduled, SequenceResult, StepResult
from paceline.kernels.gpu.speculation.accept import accept_chains
from paceline.kernels.gpu.speculation.edits import DraftedRows
from paceline.kernels.gpu.speculation.pick import PickScratch, pick_scratch
from paceline.kernels.gpu.speculation.scores import COLUMNS
from paceline.kernels.gpu.speculation.slot_rows import commit_rows
from paceline.models.device import StreamEvent, staging_tensor
from paceline.models.runner import Span
from paceline.models.runner.gpu import GpuRunner, MixedPasses
from paceline.policy.step import padded_size
from paceline.speculation.verification import PLAIN, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledPrompt:
    """Scheduled tokens of a prompt. `slot` receives the sequence after the prompt's last token. It is None if this step does
    not complete the prompt."""

    item: Scheduled
    blocks: Seq[int]
    slot: int | None

    @property
    def span(self) -> Span:
        sequence, first = self.item.sequence, self.item.sequence.num_computed
        tokens = sequence.ids[first : first + self.item.num_tokens]
        return Span(self.blocks, first, tokens, int(self.slot is not None))


@dataclass(frozen=True, slots=True, eq=False)
class SlotInputs:
    """What a mixed step reads of the slots of a batch, on the device."""

    tables: Tensor  # [slots, W] int32
    active: Tensor  # [slots] int32
    limits: Tensor  # [slots] int32, draft tokens granted
    drafts: Tensor | None  # [slots, K] int64. None if the step has no drafts


class Decoding(NamedTuple):
    """A sequence that decodes in a step with prompts."""

    slot: int
    sequence: Sequence
    limit: int
    """Draft tokens granted."""


class MixedBuffers:
    """Pinned host memory and events of one mixed step in flight."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tokens = staging_tensor(size, dtype=torch.int64, device=device)
        self.scores = staging_tensor(size, COLUMNS, dtype=torch.int32, device=device)
        self.verified, self.end = StreamEvent(device), StreamEvent(device)


@dataclass(frozen=True, slots=True, eq=False)
class InflightMixed:
    """A mixed step submitted to the device whose outcome the host has not read."""

    shape: DraftShape
    decoding: Seq[Decoding]
    prompts: Seq[ScheduledPrompt]
    begun: StepBuffers
    buffers: MixedBuffers
    is_timed: bool
    """False if a graph was captured during the step."""
    is_scored: bool
    """Whether the step has log-probabilities."""

    @property
    def max_tokens(self) -> int:
        """Tokens by which the step may extend a sequence."""
        return self.shape.levels + 1

    def wait(self) -> tuple[list[list[int]], list[int]]:
        """Block until the device has finished the step. The committed tokens of every decoding sequence (-1 after the last),
        and the next token of every prompt that is complete."""
        self.buffers.end.wait()
        width, num_joining = self.max_tokens, sum(prompt.slot is not None for prompt in self.prompts)
        end = len(self.decoding) * width
        committed: list[list[int]] = self.buffers.tokens[:end].view(-1, width).tolist()
        return committed, self.buffers.tokens[end : end + num_joining].tolist()

    @property
    def kind(self) -> tuple[int, int, int]:
        """Slots, draft nodes and prompt rows: steps of one kind take about the same time."""
        num_rows = sum(prompt.item.num_tokens for prompt in self.prompts)
        return self.begun.num_slots, self.shape.nodes, padded_size(num_rows)

    @property
    def prompt_ids(self) -> list[int]:
        """Sequences of which the step computes prompt tokens."""
        return [prompt.item.sequence.id for prompt in self.prompts]

    @property
    def draft_seconds(self) -> float:
        return self.begun.drafted.seconds_since(self.begun.begin)

    def result(self, clock: Clock) -> StepResult:
        """Wait for the step. Sequences that ended while it was in flight are left out."""
        committed, first_tokens = self.wait()
        results, context, running, first = [], 0, Status.RUNNING, iter(first_tokens)
        first_rows, row = list[int](), 0
        for (_, sequence, limit), padded in zip(self.decoding, committed, strict=True):
            if sequence.status is running:
                context += len(sequence.ids)
                tokens = tuple([token for token in padded if token >= 0])
                accepted = len(tokens) - 1
                kinds = origins(accepted, accepted == limit) if limit else PLAIN
                verdict = Verdict(chain_path(accepted), tokens, kinds)
                results.append(SequenceResult(sequence, 1, verdict, limit, limit, limit))
                first_rows.append(row)
            row += len(padded)
        for prompt in self.prompts:
            sequence = prompt.item.sequence
            ended = None if prompt.slot is None else Verdict((), (next(first),), PLAIN)
            if sequence.status is running:
                results.append(SequenceResult(sequence, prompt.item.num_tokens, ended))
                first_rows.append(row)
            row += ended is not None
        if self.is_scored:
            add_scores(results, first_rows, self.buffers.scores)
        begun, buffers, now = self.begun, self.buffers, clock.now()
        draft_seconds = self.draft_seconds
        verify_seconds = buffers.end.seconds_since(begun.drafted)
        drafted = now - verify_seconds
        return StepResult(
            sequences=results,
            times=StepTimes(drafted - draft_seconds, drafted, now),
            forward_seconds=buffers.verified.seconds_since(begun.drafted),
            verify_seconds=verify_seconds,
            rows=len(self.decoding) * (1 + self.shape.nodes) + len(first_tokens),
            context=context,
            draft_seconds=draft_seconds,
            slots=begun.num_slots,
            is_timed=self.is_timed,
            is_graph=True,
        )


class MixedSteps:
    """Submits mixed steps. Drafts in them are chains."""

    def __init__(
        self, target: GpuRunner, slots: DeviceSlots, max_rows: int, max_decoding_rows: int, max_inflight: int
    ) -> None:
        """`slots` are the slots of the largest batch. `max_decoding_rows` is the most rows of the decoding sequences, drafts
        included."""
        self._target, self._slots = target, slots
        self._passes = MixedPasses(target, max_rows, slots.size)
        self._num_picks = max_decoding_rows + slots.size
        self._buffers = [MixedBuffers(self._num_picks, target.device) for _ in range(max_inflight)]
        self._scratch: PickScratch | None = None
        self._score = slots.scorer(self._num_picks)
        self._every = torch.arange(self._num_picks, device=target.device)
        self._no_scores = torch.empty(0, COLUMNS, dtype=torch.int32, device=slots.device)
        self._count = 0

    def warm_up(self, max_rows: int, max_depth: int) -> None:
        """Load the kernels of mixed steps of up to `max_rows` rows, with up to `max_depth` drafts. No sequence is in a slot."""
        target, slots = self._target, self._slots
        for rows in sorted({min(max_rows, 1 << n) for n in range(7, max_rows.bit_length() + 1)}):
            self._passes.load_kernels(rows, with_drafts=max_depth > 0)
        tables = torch.full((slots.size, target.table_width), target.scratch_block, dtype=torch.int32).to(slots.device)
        none = torch.zeros(slots.size, dtype=torch.int32, device=slots.device)
        prompt = Span([target.scratch_block], 0, [0] * BLOCK_SIZE, 1)
        for params in (*WARM_UP_SAMPLING, WARM_UP_ALL):
            slots.load([Slot((0, 0), params, 0, 0)])
            # The kernels of features are the same for every depth but 0
            for depth in {0, max_depth} if params is WARM_UP_ALL else range(max_depth + 1):
                drafts = torch.zeros(slots.size, depth, dtype=torch.int64, device=slots.device) if depth else None
                inputs = SlotInputs(tables, none, none, drafts)
                self._compute(self._buffers[0], inputs, [0][: slots.size - 1], [prompt], [slots.size - 1])

    def captures(self) -> list[Callable[[], object]]:
        """Functions that capture the passes with drafts. Passes without drafts are captured with the passes of the target."""
        return list(self._passes.captures())

    def submit(
        self,
        inputs: SlotInputs,
        shape: DraftShape,
        begun: StepBuffers,
        decoding: Seq[Decoding],
        prompts: Seq[ScheduledPrompt],
        is_timed: bool,
    ) -> InflightMixed:
        """Queue one step, after the batch has begun it."""
        buffers = self._buffers[self._count % len(self._buffers)]
        self._count += 1
        ending = [prompt.slot for prompt in prompts if prompt.slot is not None]
        spans = [prompt.span for prompt in prompts]
        tokens, scores = self._compute(buffers, inputs, [entry.slot for entry in decoding], spans, ending)
        buffers.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        buffers.scores[: len(scores)].copy_(scores, non_blocking=True)
        buffers.end.record()
        is_scored = self._slots.sampling.is_scored
        return InflightMixed(shape, decoding, prompts, begun, buffers, is_timed, is_scored)

    @torch.inference_mode()
    def _compute(
        self, buffers: MixedBuffers, inputs: SlotInputs, decoding: Seq[int], prompts: Seq[Span], ending: Seq[int]
    ) -> tuple[Tensor, Tensor]:
        """Queue the pass and the new state of the slots in `decoding` and `ending`. Returns the tokens committed there, and
        their log-probabilities if a slot wants some."""
        slots, state, drafts = self._slots, self._slots.state, inputs.drafts
        slots.params.upload()
        sampling = slots.sampling
        output = self._passes.run(state, inputs.tables, drafts, decoding, prompts, ending)
        buffers.verified.record()
        if output.logits is None:
            return self._every[:0], self._no_scores
        if self._scratch is None:
            self._scratch = pick_scratch(self._num_picks, output.logits.shape[1], slots.device)
        params = slots.tensors
        if sampling.kind != "greedy":
            params = params.map(lambda values: values[output.slots])
        positions = output.positions[output.rows] + 1
        width = 1 if drafts is None else 1 + drafts.shape[1]
        num_rows = len(decoding) * width if width > 1 else 0  # those of slots with drafts
        drafted = None if drafts is None else DraftedRows(drafts, width, num_rows)
        logits = slots.edited(output.logits, positions, sampling, output.slots, drafted=drafted)
        picks = sample(logits, positions, params, sampling, self._scratch)
        tokens = picks
        if drafts is not None and num_rows:
            by_sequence = picks[:num_rows].view(len(decoding), -1)
            accepted = accept_chains(drafts, by_sequence, inputs.limits, inputs.active, state, slots=output.decoding)
            slots.count(accepted.tokens, sampling, output.decoding)
            tokens = torch.cat((accepted.tokens.flatten(), picks[num_rows:]))
        commit_rows(state, output.rows, output.slots, output.tokens, output.positions, picks, first=num_rows)
        slots.count(picks[num_rows:].unsqueeze(1), sampling, output.slots[num_rows:])
        if not sampling.is_scored:
            return tokens, self._no_scores
        scores = torch.empty(len(tokens), COLUMNS, dtype=torch.int32, device=slots.device)
        self._score(output.logits, self._every[: len(tokens)], tokens, 1, scores, output.slots)
        return tokens, scores
