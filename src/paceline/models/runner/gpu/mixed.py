"""Mixed passes over prompts and over sequences that decode, whose newest tokens and lengths only the device knows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.gpu.attention.plan import FEW_ROWS, search_width
from paceline.kernels.gpu.speculation.accept import DeviceState
from paceline.kernels.gpu.speculation.slot_rows import place_slots
from paceline.models.device import StreamEvent, staging_tensor
from paceline.models.runner import Span, long_prompts
from paceline.models.runner.gpu.passes import PassKind
from paceline.models.runner.gpu.ragged import (
    RaggedGraph,
    RaggedInputs,
    RaggedPass,
    RaggedSize,
    max_captured_rows,
    padded_rows,
    ragged_size,
    ragged_sizes,
)
from paceline.models.runner.gpu.runner import GpuRunner


@dataclass(frozen=True, slots=True, eq=False)
class MixedOutput:
    """Logits of every decoding row, then of the last row of every prompt that is complete."""

    logits: Tensor | None  # [R, V] float32. None if no row has logits
    rows: Tensor  # [R] int64, rows of the pass that have logits
    slots: Tensor  # [R] int64, their slots
    decoding: Tensor  # [D] int64, slots of the decoding sequences
    tokens: Tensor  # [T] int64, of all rows
    positions: Tensor  # [T] int64, of all rows


class MixedPasses:
    """Runs mixed passes without waiting for the device. A pass that the runner has captured runs as that graph."""

    def __init__(self, runner: GpuRunner, max_rows: int, max_sequences: int) -> None:
        self._runner, self._max_rows = runner, max_rows
        most = RaggedSize(search_width(max_sequences), padded_rows(max_rows))
        self._inputs = RaggedInputs(runner.device, runner.table_width, most.rows, most.sequences)
        self._passes: dict[tuple[RaggedSize, int], RaggedPass] = {}
        self._captured: dict[RaggedSize, RaggedGraph] = {}
        """Passes whose decoding sequences have several rows. The runner holds the passes with one row each."""
        # Rows with logits, their slots, slots of the decoding sequences. The host writes one copy while the other is in use.
        most_numbers = 2 * most.rows + most.sequences + 2
        self._index = torch.zeros(most_numbers, dtype=torch.int64, device=runner.device)
        self._staging = [
            (staging_tensor(most_numbers, dtype=torch.int64, device=runner.device), StreamEvent(runner.device))
            for _ in range(2)
        ]
        self._count = 0

    @torch.inference_mode()
    def run(
        self,
        state: DeviceState,
        tables: Tensor,  # [slots, W] int32
        drafts: Tensor | None,  # [slots, K] int64. None if K is 0
        decoding: Sequence[int],
        prompts: Sequence[Span],
        ending: Sequence[int],
    ) -> MixedOutput:
        """Computes 1 + K rows for each slot in `decoding`, then the rows of `prompts`. `ending` has the slots of the prompts
        that have logits, in their order."""
        num_decoding, rows_each = len(decoding), 1 if drafts is None else 1 + drafts.shape[1]
        num_rows = num_decoding * rows_each + sum(len(span.tokens) for span in prompts)
        ragged = self._pass(num_decoding + len(prompts), num_rows, rows_each)
        device = ragged.on_device
        logit_rows = self._write(ragged, num_decoding, rows_each, prompts)
        row_slots = [slot for slot in decoding for _ in range(rows_each)]
        rows, slots, decoded = self._copy_index(logit_rows, [*row_slots, *ending], decoding)
        if num_decoding:
            torch.index_select(tables, 0, decoded, out=device.tables[:num_decoding])
            most = self._runner.model.config.max_position
            place_slots(state, drafts, decoded, device.tokens, device.positions, device.contexts, most)
        # Attention distinguishes the sequences that decode from prompts by their number of rows
        has_known_rows = all(len(span.tokens) > rows_each for span in prompts)
        longs = long_prompts(prompts, num_decoding, num_decoding * rows_each)
        logits = ragged.logits(rows, longs, num_decoding if has_known_rows else 0, rows_each)
        return MixedOutput(logits, rows, slots, decoded, device.tokens, device.positions)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Span]) -> None:
        """Compute prompts alone, without logits."""
        ragged = self._pass(len(prompts), sum(len(span.tokens) for span in prompts), 1)
        self._write(ragged, 0, 1, prompts)
        ragged.logits(self._index[:0], long_prompts(prompts))

    @torch.inference_mode()
    def load_kernels(self, rows: int, with_drafts: bool) -> None:
        """Run passes of `rows` rows of padding, for every width of the search for a row's sequence."""
        most = self._inputs.max_sequences
        for sequences in sorted({search_width(count) for count in range(1, most + 1)}):
            for rows_each in (1, FEW_ROWS) if with_drafts else (1,):
                ragged = self._pass(sequences, rows, rows_each)
                self._write(ragged, 0, 1, ())
                ragged.forward()

    def captures(self) -> list[Callable[[], None]]:
        """Functions that capture the passes in which sequences that decode have several rows. `load_kernels` was called."""
        most = min(self._max_rows, max_captured_rows(self._runner.model.weight_bytes))
        sizes = ragged_sizes(self._inputs.max_sequences, most)
        return [torch.inference_mode()(partial(self._capture, size)) for size in sizes if size.sequences > 1]

    def _capture(self, size: RaggedSize) -> None:
        if size not in self._captured:
            context = self._runner.context
            self._captured[size] = RaggedGraph(context, self._inputs, size, PassKind(), few_rows=FEW_ROWS)

    def _write(self, ragged: RaggedPass, num_decoding: int, rows_each: int, prompts: Sequence[Span]) -> list[int]:
        """Queue the copy of the host's inputs; returns the rows whose logits are requested."""
        host = ragged.inputs.next_on_host(ragged.size)
        logit_rows = host.write_mixed(num_decoding, rows_each, prompts)
        ragged.on_device.copy(host, num_decoding + len(prompts))
        ragged.inputs.mark_copied()
        return logit_rows

    def _pass(self, sequences: int, rows: int, rows_each: int) -> RaggedPass:
        """A pass of this size; sequences that decode have `rows_each` rows."""
        config = self._runner.model.config
        # Tiles of the tensor cores have 16 queries at least
        few_rows = 1 if rows_each * (config.num_heads // config.num_kv_heads) <= 16 else FEW_ROWS
        captured = self._captured.get(ragged_size(sequences, rows))
        if few_rows == 1:  # the graph of several sequences serves a single one too
            captured = self._runner.captured_ragged(max(2, sequences), rows)
        if captured is not None:
            return captured
        key = RaggedSize(search_width(sequences), padded_rows(rows)), few_rows
        if key not in self._passes:
            self._passes[key] = RaggedPass(self._runner.context, self._inputs, key[0], PassKind(), few_rows)
        return self._passes[key]

    def _copy_index(
        self, rows: Sequence[int], slots: Sequence[int], decoding: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        staging, copied = self._staging[self._count % 2]
        self._count += 1
        copied.wait()
        count, numbers, index = len(rows), staging.numpy(), self._index
        second = count + count % 2  # kernels expect addresses that are multiples of 16 bytes
        third = 2 * second
        end = third + len(decoding)
        numbers[:count], numbers[second : second + count], numbers[third:end] = rows, slots, decoding
        index[:end].copy_(staging[:end], non_blocking=True)
        copied.record()
        return index[:count], index[second : second + count], index[third:end]
