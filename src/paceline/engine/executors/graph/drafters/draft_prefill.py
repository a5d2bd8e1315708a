"""Draft prefills of sequences that join a batch while it drafts. They run beside the target's pass, in their own stream."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.models.cuda_graph import SideStream, StreamEvent
from paceline.models.gpu.mixed import MixedPasses
from paceline.models.gpu.runner import GpuRunner
from paceline.models.runner import Span
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposers.model_drafter import Chunk, DraftSequence, ModelDrafter


@dataclass(frozen=True, slots=True, eq=False)
class InflightPrefill:
    """A draft prefill submitted to the device."""

    tokens: int
    begin: StreamEvent
    end: StreamEvent

    @property
    def is_done(self) -> bool:
        return self.end.is_reached

    def cost(self) -> DraftPrefill:
        """What it cost, once it is done."""
        return DraftPrefill(self.tokens, self.end.seconds_since(self.begin))


class DraftPrefills:
    def __init__(self, drafter: ModelDrafter[Tensor], max_sequences: int) -> None:
        runner = drafter.runner
        assert isinstance(runner, GpuRunner)
        self._drafter, self._device = drafter, runner.device
        self._max_rows = drafter.max_rows
        self._passes = MixedPasses(runner, drafter.max_rows, max_sequences)
        self._stream = SideStream(runner.device)

    def warm_up(self) -> None:
        """Load the kernels of all passes."""
        now, done = StreamEvent(self._device), StreamEvent(self._device)
        now.record()
        with self._stream.after(now):
            for rows in sorted({min(self._max_rows, 1 << n) for n in range(7, self._max_rows.bit_length() + 1)}):
                self._passes.load_kernels(rows, with_drafts=False)
            done.record()
        done.wait()

    def submit(self, sequences: Seq[DraftSequence], after: StreamEvent) -> InflightPrefill:
        """Compute all tokens of these sequences but the last, behind `after`, the last use of the draft model. Their blocks are
        reserved. The next use of the draft model has to wait for `end`."""
        prefill = InflightPrefill(0, StreamEvent(self._device), StreamEvent(self._device))
        with self._stream.after(after):
            prefill.begin.record()
            tokens = self._compute(sequences)
            prefill.end.record()
        return replace(prefill, tokens=tokens)

    def _compute(self, sequences: Seq[DraftSequence]) -> int:
        """Queue the passes; returns the number of tokens."""
        drafter = self._drafter
        spans, total, room = list[Span](), 0, self._max_rows
        for sequence in sequences:
            while (missing := sequence.num_missing - 1) > 0:
                chunk = Chunk(sequence, min(missing, room))
                spans.append(drafter.span(chunk))
                drafter.advance(chunk)
                total, room = total + chunk.num_tokens, room - chunk.num_tokens
                if room == 0:
                    self._passes.prefill(spans)
                    spans, room = [], self._max_rows
        if spans:
            self._passes.prefill(spans)
        return total
