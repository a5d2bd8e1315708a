"""Mixed passes: prompts beside sequences that decode, of which only the device knows the newest tokens and the lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.gpu.attention_plan import search_width
from paceline.kernels.gpu.speculation.accept import DeviceState
from paceline.kernels.gpu.speculation.slot_rows import place_slots
from paceline.models.cuda_graph import StreamEvent, staging_tensor
from paceline.models.gpu.decoder import head_logits
from paceline.models.gpu.forward_pass import PassKind
from paceline.models.gpu.ragged import RaggedInputs, RaggedPass, RaggedSize, padded_rows
from paceline.models.gpu.runner import GpuRunner
from paceline.models.runner import Span


@dataclass(frozen=True, slots=True, eq=False)
class MixedOutput:
    """Logits of every decoding row, then of the last row of every prompt that is complete."""

    logits: Tensor | None  # [R, V] float32; None: no row has logits
    rows: Tensor  # [R] int64, rows of the pass that have logits
    slots: Tensor  # [R] int64, their slots
    tokens: Tensor  # [T] int64, of all rows
    positions: Tensor  # [T] int64, of all rows


class MixedPasses:
    """Runs mixed passes without waiting for the device. A pass that the runner has captured runs as that graph."""

    def __init__(self, runner: GpuRunner, max_rows: int, max_sequences: int) -> None:
        self._runner = runner
        most = RaggedSize(search_width(max_sequences), padded_rows(max_rows))
        self._inputs = RaggedInputs(runner.device, runner.table_width, most.rows, most.sequences)
        self._passes: dict[RaggedSize, RaggedPass] = {}
        # Rows with logits, then their slots; two pairs, as one waits to be copied while the other is written
        self._index = torch.zeros(2, most.sequences, dtype=torch.int64, device=runner.device)
        self._staging = [
            (staging_tensor(2, most.sequences, dtype=torch.int64, device=runner.device), StreamEvent(runner.device))
            for _ in range(2)
        ]
        self._count = 0

    @torch.inference_mode()
    def run(
        self,
        state: DeviceState,
        tables: Tensor,  # [slots, W] int32
        decoding: Sequence[int],
        prompts: Sequence[Span],
        ending: Sequence[int],
    ) -> MixedOutput:
        """One row for each slot in `decoding`, then the rows of `prompts`. `ending`: slots of the prompts that have logits, in
        their order."""
        num_decoding = len(decoding)
        num_rows = num_decoding + sum(len(span.tokens) for span in prompts)
        ragged = self._pass(num_decoding + len(prompts), num_rows)
        device, host = ragged.on_device, ragged.inputs.next_on_host(ragged.size)
        logit_rows = host.write_mixed(num_decoding, prompts)
        device.copy(host, num_decoding + len(prompts))
        ragged.inputs.mark_copied()
        rows, slots = self._copy_index(logit_rows, [*decoding, *ending])
        if num_decoding:
            torch.index_select(tables, 0, slots[:num_decoding], out=device.tables[:num_decoding])
            most = self._runner.model.config.max_position
            place_slots(state, slots[:num_decoding], device.tokens, device.positions, device.contexts, most)
        states = ragged.forward().last_hidden
        assert states is not None
        logits = head_logits(self._runner.model, states[rows]) if len(rows) else None
        return MixedOutput(logits, rows, slots, device.tokens, device.positions)

    @torch.inference_mode()
    def load_kernels(self, rows: int) -> None:
        """Run passes of `rows` rows of padding, for every width of the search for a row's sequence."""
        most = self._inputs.max_sequences
        for sequences in sorted({search_width(count) for count in range(1, most + 1)}):
            ragged = self._pass(sequences, rows)
            host = ragged.inputs.next_on_host(ragged.size)
            host.write_mixed(0, ())
            ragged.on_device.copy(host, sequences)
            ragged.inputs.mark_copied()
            ragged.forward()

    def _pass(self, sequences: int, rows: int) -> RaggedPass:
        captured = self._runner.captured_ragged(sequences, rows)
        if captured is not None:
            return captured
        size = RaggedSize(search_width(sequences), padded_rows(rows))
        if size not in self._passes:
            self._passes[size] = RaggedPass(self._runner.context, self._inputs, size, PassKind())
        return self._passes[size]

    def _copy_index(self, rows: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        staging, copied = self._staging[self._count % 2]
        self._count += 1
        copied.wait()
        numbers = staging.numpy()
        numbers[0, : len(rows)], numbers[1, : len(rows)] = rows, slots
        self._index.copy_(staging, non_blocking=True)
        copied.record()
        return self._index[0, : len(rows)], self._index[1, : len(rows)]
