"""Steps that compute prompts beside the decoding slots, in one pass that the host does not wait for."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.output import StepTimes
from paceline.core.sequence import Sequence, Status
from paceline.engine.executors.executor import SequenceResult, StepResult
from paceline.engine.executors.graph.slots import WARM_UP_SAMPLING, DeviceSlots, Slot, sample
from paceline.engine.schedule import Scheduled
from paceline.kernels.gpu.speculation.pick import PickScratch, pick_scratch
from paceline.kernels.gpu.speculation.slot_rows import commit_rows
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.cuda_graph import StreamEvent, staging_tensor
from paceline.models.gpu.mixed import MixedPasses
from paceline.models.gpu.runner import GpuRunner
from paceline.models.runner import Span
from paceline.speculation.verification.verify import PLAIN, Verdict

CHEAP_ROWS = 512
"""Rows up to which a pass hides most of the work of prompts behind reading the weights."""
MIXED_PROMPT_ROWS = 2048
"""Most prompt rows of a mixed step. More rows would not be computed faster, and decoding sequences would wait longer."""
BACKLOG_SHARE = 4
"""A mixed step computes one part in so many of the prompts that wait, if these are more than cheap rows."""


def prompt_budget(num_decoding: int, num_waiting: int) -> int:
    """Prompt rows of the next mixed step, beside `num_decoding` sequences, of `num_waiting` rows in all."""
    backlog = min(MIXED_PROMPT_ROWS, num_waiting // BACKLOG_SHARE)
    return max(BLOCK_SIZE, CHEAP_ROWS - num_decoding, backlog)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Scheduled tokens of a prompt. `slot` receives the sequence after its last token; None: tokens are still to come."""

    item: Scheduled
    blocks: Seq[int]
    slot: int | None

    @property
    def span(self) -> Span:
        sequence, first = self.item.sequence, self.item.sequence.num_computed
        tokens = sequence.ids[first : first + self.item.num_tokens]
        return Span(self.blocks, first, tokens, int(self.slot is not None))


class MixedBuffers:
    """Pinned host memory and events of one mixed step in flight."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tokens = staging_tensor(size, dtype=torch.int64, device=device)
        self.begin, self.verified, self.end = (StreamEvent(device) for _ in range(3))


@dataclass(frozen=True, slots=True, eq=False)
class InflightMixed:
    """A mixed step submitted to the device whose outcome the host has not read."""

    decoding: Seq[Sequence]
    prompts: Seq[Prompt]
    buffers: MixedBuffers

    max_tokens = 1
    """Tokens by which the step may extend a sequence."""

    def wait(self) -> list[int]:
        """Block until the device has finished the step. The next tokens of the decoding sequences, then of the prompts that are
        complete."""
        self.buffers.end.wait()
        count = len(self.decoding) + sum(prompt.slot is not None for prompt in self.prompts)
        tokens: list[int] = self.buffers.tokens[:count].tolist()
        return tokens

    @property
    def prompt_ids(self) -> list[int]:
        """Sequences of which the step computes prompt tokens."""
        return [prompt.item.sequence.id for prompt in self.prompts]

    def result(self, clock: Clock) -> StepResult:
        """Wait for the step. Sequences that ended while it was in flight are left out."""
        tokens, context, running = iter(self.wait()), 0, Status.RUNNING
        results = []
        for sequence, token in zip(self.decoding, tokens, strict=False):
            if sequence.status is running:
                context += len(sequence.ids)
                results.append(SequenceResult(sequence, 1, Verdict((), (token,), PLAIN)))
        for prompt in self.prompts:
            sequence = prompt.item.sequence
            verdict = None if prompt.slot is None else Verdict((), (next(tokens),), PLAIN)
            if sequence.status is running:
                results.append(SequenceResult(sequence, prompt.item.num_tokens, verdict))
        buffers, now = self.buffers, clock.now()
        verify_seconds = buffers.end.seconds_since(buffers.begin)
        return StepResult(
            sequences=results,
            times=StepTimes(now - verify_seconds, now - verify_seconds, now),
            forward_seconds=buffers.verified.seconds_since(buffers.begin),
            verify_seconds=verify_seconds,
            rows=sum(one.verdict is not None for one in results),
            context=context,
            draft_seconds=0.0,
            is_timed=False,
            is_graph=True,
        )


class MixedSteps:
    """Submits mixed steps. Every decoding row is one token without drafts."""

    def __init__(self, target: GpuRunner, slots: DeviceSlots, max_rows: int, max_inflight: int) -> None:
        """`slots`: those of the largest batch."""
        self._target, self._slots = target, slots
        self._passes = MixedPasses(target, max_rows, slots.size)
        self._buffers = [MixedBuffers(slots.size, target.device) for _ in range(max_inflight)]
        self._scratch: PickScratch | None = None
        self._count = 0

    def warm_up(self, max_rows: int) -> None:
        """Load the kernels of mixed steps of up to `max_rows` rows. No sequence is in a slot."""
        target, slots = self._target, self._slots
        for rows in sorted({min(max_rows, 1 << n) for n in range(7, max_rows.bit_length() + 1)}):
            self._passes.load_kernels(rows)
        tables = torch.full((slots.size, target.table_width), target.scratch_block, dtype=torch.int32)
        prompt = Span([target.scratch_block], 0, [0] * BLOCK_SIZE, 1)
        for params in WARM_UP_SAMPLING:
            slots.load([Slot((0, 0), params, 0, 0)])
            self._compute(self._buffers[0], tables.to(slots.device), [0][: slots.size - 1], [prompt], [slots.size - 1])

    def submit(self, tables: Tensor, decoding: Seq[tuple[int, Sequence]], prompts: Seq[Prompt]) -> InflightMixed:
        """Queue one step. `tables`: block tables of the slots on the device; `decoding`: slots and their sequences."""
        buffers = self._buffers[self._count % len(self._buffers)]
        self._count += 1
        ending = [prompt.slot for prompt in prompts if prompt.slot is not None]
        spans = [prompt.span for prompt in prompts]
        tokens = self._compute(buffers, tables, [slot for slot, _ in decoding], spans, ending)
        if tokens is not None:
            buffers.tokens[: len(tokens)].copy_(tokens, non_blocking=True)
        buffers.end.record()
        return InflightMixed([sequence for _, sequence in decoding], prompts, buffers)

    @torch.inference_mode()
    def _compute(
        self, buffers: MixedBuffers, tables: Tensor, decoding: Seq[int], prompts: Seq[Span], ending: Seq[int]
    ) -> Tensor | None:
        """Queue the pass and the new state of the slots in `decoding` and `ending`; returns their next tokens."""
        slots, state = self._slots, self._slots.state
        slots.params.upload()
        buffers.begin.record()
        output = self._passes.run(state, tables, decoding, prompts, ending)
        buffers.verified.record()
        if output.logits is None:
            return None
        if self._scratch is None:
            self._scratch = pick_scratch(slots.size, output.logits.shape[1], slots.device)
        params = slots.tensors
        if slots.sampling != "greedy":
            params = params.map(lambda values: values[output.slots])
        positions = output.positions[output.rows] + 1
        tokens = sample(output.logits, positions, params, slots.sampling, self._scratch)
        commit_rows(state, output.rows, output.slots, output.tokens, output.positions, tokens)
        return tokens
