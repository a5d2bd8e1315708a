"""Draft prefills of sequences that join a batch, or whose drafts are behind. They run at the same time as the target's pass, in
their own stream."""

from collections.abc import Sequence as Seq

from torch import Tensor

from paceline.models.cuda_graph import SideStream, StreamEvent
from paceline.models.gpu.mixed import MixedPasses
from paceline.models.gpu.ragged import MAX_RAGGED_ROWS
from paceline.models.gpu.runner import GpuRunner
from paceline.models.runner import Span
from paceline.speculation.proposers.model_drafter import Chunk, DraftSequence, ModelDrafter


class DraftPrefills:
    def __init__(self, drafter: ModelDrafter[Tensor], max_sequences: int) -> None:
        runner = drafter.runner
        assert isinstance(runner, GpuRunner)
        self._drafter, self._device = drafter, runner.device
        # Larger passes have no graph, and launching them takes longer than a small model computes
        self._max_rows = min(drafter.max_rows, MAX_RAGGED_ROWS)
        self._passes = MixedPasses(runner, self._max_rows, max_sequences)
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

    def submit(self, sequences: Seq[DraftSequence], after: StreamEvent, num_left: int) -> StreamEvent:
        """Compute all tokens of these sequences but the last `num_left`, behind `after`, the last use of the draft model. Their
        blocks are reserved. Returns the end, for which the next use of the draft model has to wait. The depth policy gets no
        cost: the target's pass hides it, and the time between begin and end is mostly that of the pass."""
        end = StreamEvent(self._device)
        with self._stream.after(after):
            self._compute(sequences, num_left)
            end.record()
        return end

    def _compute(self, sequences: Seq[DraftSequence], num_left: int) -> None:
        """Queue the passes."""
        drafter = self._drafter
        spans, room = list[Span](), self._max_rows
        for sequence in sequences:
            while (missing := sequence.num_missing - num_left) > 0:
                chunk = Chunk(sequence, min(missing, room))
                spans.append(drafter.span(chunk))
                drafter.advance(chunk)
                room -= chunk.num_tokens
                if room == 0:
                    self._passes.prefill(spans)
                    spans, room = [], self._max_rows
        if spans:
            self._passes.prefill(spans)
