"""Captured passes over spans of different lengths: prompts, alone or in a batch with sequences that decode.

A small model computes such a pass in less time than the host needs to launch its kernels. Passes are padded to a few sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.formats.layout import LONG_ROWS, AttentionLayout, LongPrompt, PassSize
from paceline.kernels.gpu.attention.plan import power_of_two, search_width
from paceline.models.decoder import ForwardOutput, head_logits
from paceline.models.device import MAX_GRAPH_ROWS, Graph, StreamEvent, staging_tensor
from paceline.models.runner import Span
from paceline.models.runner.gpu.passes import PassKind
from paceline.models.runner.gpu.workspace import PassContext

MAX_RAGGED_ROWS = LONG_ROWS
MAX_RAGGED_SEQUENCES = 256
_MAX_WORK = 17 * 10**12
"""Weight bytes times rows above which launches overlap with the work (1,024 rows of 8 billion weights in bf16)."""
PADDING = 64
"""Rows of small passes are padded to a multiple of this number, to two of it at least."""
_ALIGNED = 4
"""Alignment, in 32-bit numbers, that kernels expect of their inputs."""


@dataclass(frozen=True, slots=True)
class RaggedSize:
    """Size that a pass is padded to. Padding rows belong to no sequence: they are neither attended to nor stored."""

    sequences: int
    rows: int


def ragged_size(sequences: int, rows: int) -> RaggedSize:
    """Padded size of a pass. From 1024 rows on, at most an eighth of them is padding."""
    return RaggedSize(search_width(sequences), padded_rows(rows, power_of_two(rows) // 16))


def padded_rows(rows: int, step: int = 1) -> int:
    """The next size from `rows` on, a multiple of `step`, for which the vendor's products are fast: on an H200 those of 448
    rows take longer than those of 512."""
    step = max(step, PADDING if rows <= 6 * PADDING else 2 * PADDING)
    return max(2 * PADDING, -(-rows // step) * step)


def max_captured_rows(weight_bytes: int) -> int:
    """Rows of the largest ragged pass that is captured, for a model of this size."""
    return min(MAX_RAGGED_ROWS, _MAX_WORK // weight_bytes)


def ragged_sizes(max_num_seqs: int, max_rows: int) -> list[RaggedSize]:
    """Padded sizes of all passes within these limits, the largest first. `PassGraph` covers small passes of one sequence."""
    counts = {search_width(count) for count in range(1, min(max_num_seqs, MAX_RAGGED_SEQUENCES) + 1)}
    totals = {ragged_size(1, rows).rows for rows in range(1, max_rows + 1)}
    return [
        RaggedSize(count, rows)
        for rows in sorted(totals, reverse=True)
        for count in sorted(counts, reverse=True)
        if count > 1 or rows > MAX_GRAPH_ROWS
    ]


class RaggedInputs:
    """Input buffers of all ragged passes of a runner, which run one after another. The host writes the inputs of one pass while
    those of the pass before it wait to be copied."""

    def __init__(
        self,
        device: torch.device,
        table_width: int,
        max_rows: int = MAX_RAGGED_ROWS,
        max_sequences: int = MAX_RAGGED_SEQUENCES,
    ) -> None:
        self._width, self.max_sequences = table_width, max_sequences
        longs, ints = 3 * max_rows, max_sequences * (2 + table_width) + 3 * _ALIGNED
        self._longs = torch.zeros(longs, dtype=torch.int64, device=device)
        self._ints = torch.zeros(ints, dtype=torch.int32, device=device)
        self._staging = [
            (
                staging_tensor(longs, dtype=torch.int64, device=device),
                staging_tensor(ints, dtype=torch.int32, device=device),
                StreamEvent(device),
            )
            for _ in range(2)
        ]
        self._turn = 0
        self._views: dict[tuple[int, RaggedSize], RaggedViews] = {}

    def on_device(self, size: RaggedSize) -> "RaggedViews":
        return RaggedViews(self._longs, self._ints, size, self._width)

    def next_on_host(self, size: RaggedSize) -> "RaggedViews":
        """Host memory for the next pass. Blocks until it has been copied to the device for the pass before the last."""
        self._turn = 1 - self._turn
        longs, ints, copied = self._staging[self._turn]
        copied.wait()
        key = self._turn, size
        if key not in self._views:
            self._views[key] = RaggedViews(longs, ints, size, self._width)
        return self._views[key]

    def mark_copied(self) -> None:
        """Record that all copies of this pass were submitted."""
        self._staging[self._turn][2].record()


class RaggedViews:
    """Views of the inputs of one size. They are adjacent, so that two copies transfer all of them."""

    def __init__(self, longs: Tensor, ints: Tensor, size: RaggedSize, table_width: int) -> None:
        starts, contexts = _aligned(size.sequences + 1), _aligned(size.sequences)
        self.longs = longs[: 3 * size.rows]
        self.ints = ints[: starts + contexts + size.sequences * table_width]
        self.tokens, self.positions, self.ancestors = self.longs.view(3, size.rows)
        self.starts = self.ints[: size.sequences + 1]
        self.contexts = self.ints[starts : starts + size.sequences]
        self.tables = self.ints[starts + contexts :].view(size.sequences, table_width)

    def copy(self, other: "RaggedViews", sequences: int) -> None:
        """Copy from `other`, with the block tables of the first `sequences` sequences only: they are most of the data."""
        used = len(self.ints) - (len(self.tables) - sequences) * self.tables.shape[1]
        self.longs.copy_(other.longs, non_blocking=True)
        self.ints[:used].copy_(other.ints[:used], non_blocking=True)

    def write(self, spans: Sequence[Span]) -> tuple[int, list[int]]:
        """Write `spans` to host memory. Returns the number of rows, and the rows whose logits are requested."""
        parts = self.tokens, self.positions, self.ancestors, self.starts, self.contexts, self.tables
        tokens, positions, ancestors, starts, contexts, tables = (part.numpy() for part in parts)
        ids, row_positions, first_rows, logit_rows = list[int](), list[int](), list[int](), list[int]()
        for s, span in enumerate(spans):
            row, first = len(ids), span.context_len
            ids.extend(span.tokens)
            end = len(ids)
            row_positions.extend(range(first, first + end - row) if span.positions is None else span.positions)
            ancestors[row:end] = -1 if span.ancestors is None else span.ancestors
            first_rows.append(row)
            held = min(len(span.blocks), tables.shape[1])
            tables[s, :held] = span.blocks[:held]
            logit_rows.extend(range(end - span.num_logits, end))
        rows = len(ids)
        tokens[:rows], positions[:rows] = ids, row_positions
        starts[: len(spans)], contexts[: len(spans)] = first_rows, [span.context_len for span in spans]
        starts[len(spans) :] = rows  # unused sequences have no rows
        tokens[rows:] = (
            0  # HAZARD: padding rows are embedded too, and a pass of another size may have left any value here
        )
        return rows, logit_rows

    def write_mixed(self, num_decoding: int, rows_each: int, prompts: Sequence[Span]) -> list[int]:
        """Write the prompts to host memory, after `num_decoding` sequences of `rows_each` rows, which the device fills in.
        Returns the rows whose logits are requested, those of the decoding sequences first."""
        parts = self.tokens, self.positions, self.starts, self.contexts, self.tables
        tokens, positions, starts, contexts, tables = (part.numpy() for part in parts)
        row = num_decoding * rows_each
        starts[:num_decoding] = range(0, row, rows_each)
        logit_rows = list(range(row))
        for sequence, span in enumerate(prompts, num_decoding):
            first, end = row, row + len(span.tokens)
            tokens[first:end] = span.tokens
            positions[first:end] = range(span.context_len, span.context_len + end - first)
            starts[sequence], contexts[sequence] = first, span.context_len
            held = min(len(span.blocks), tables.shape[1])
            tables[sequence, :held] = span.blocks[:held]
            logit_rows.extend(range(end - span.num_logits, end))
            row = end
        starts[num_decoding + len(prompts) :] = row  # unused sequences have no rows
        tokens[row:] = 0  # HAZARD: padding rows are embedded too
        return logit_rows


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


class RaggedPass:
    """A pass of one size over inputs at fixed addresses. It returns the hidden states of all rows after the final norm. Few
    rows of a prompt need logits, which are computed after the pass."""

    def __init__(
        self, context: PassContext, inputs: RaggedInputs, size: RaggedSize, kind: PassKind, few_rows: int = 1
    ) -> None:
        """`few_rows` is the number of rows of each sequence that decodes in a pass with prompts."""
        self.size, self.inputs, self.on_device = size, inputs, inputs.on_device(size)
        self._context, self._kind = context, kind
        self._layout = AttentionLayout(
            slots=self.on_device.tokens,  # unused: passes of many rows look slots up in the block tables
            starts=self.on_device.starts,
            context_lens=self.on_device.contexts,
            block_tables=self.on_device.tables,
            ancestors=self.on_device.ancestors if kind.is_tree else None,
        )
        self._pass_size = PassSize(size.rows, size.sequences, size.rows, few_rows, is_tree=kind.is_tree)
        self._plan = context.plan(self._pass_size)
        self._attention_out = context.workspace.attention_output(size.rows)

    def forward(self) -> ForwardOutput:
        """Hidden states of all rows, and inner states of the kind's layers. There are no logits."""
        return self._forward(self._layout, None, last_hidden=True, size=self._pass_size)

    def logits(
        self, rows: Tensor, prompts: tuple[LongPrompt, ...] = (), num_decoding: int = 0, rows_each: int = 1
    ) -> Tensor | None:
        """The logits [R, V] of `rows` [R]. None if R is 0. `prompts` are `AttentionLayout.long_prompts`. `num_decoding` is as
        in `PassSize`; these sequences have `rows_each` rows."""
        layout = replace(self._layout, long_prompts=prompts) if prompts else self._layout
        size = self._pass_size
        if num_decoding:
            size = replace(size, few_rows=rows_each, num_decoding=num_decoding)
        return self._forward(layout, rows, last_hidden=False, size=size).logits

    def _forward(
        self, layout: AttentionLayout, logit_rows: Tensor | None, last_hidden: bool, size: PassSize
    ) -> ForwardOutput:
        return self._context.forward(
            size,
            self._plan if size is self._pass_size else self._context.plan(size),
            self.on_device.tokens,
            self.on_device.positions,
            layout,
            logit_rows,
            self._kind.state_layers,
            last_hidden,
            attention_out=self._attention_out,
        )


class RaggedGraph(RaggedPass):
    """A captured `RaggedPass`."""

    def __init__(
        self,
        context: PassContext,
        inputs: RaggedInputs,
        size: RaggedSize,
        kind: PassKind,
        is_warm: bool = False,
        few_rows: int = 1,
    ) -> None:
        super().__init__(context, inputs, size, kind, few_rows)
        host = inputs.next_on_host(size)
        host.write([])
        self.on_device.copy(host, size.sequences)
        inputs.mark_copied()
        states_out = context.workspace.states(len(kind.state_layers) + 1, size.rows)
        compute = super().forward

        def copied() -> ForwardOutput:
            output = compute()
            assert output.last_hidden is not None
            outs = zip(kind.state_layers, states_out[:-1], strict=True)
            inner = {layer: out.copy_(output.hidden_by_layer[layer]) for layer, out in outs}
            return ForwardOutput(None, states_out[-1].copy_(output.last_hidden), inner)

        self._graph = Graph(copied, context.device, context.workspace.graph_pool, is_warm)
        self._logit_rows = torch.empty(0, dtype=torch.int64)

    def forward(self) -> ForwardOutput:
        """Computes `RaggedPass.forward`. The states are valid until the next pass."""
        return self._graph.replay()

    def logits(
        self, rows: Tensor, prompts: tuple[LongPrompt, ...] = (), num_decoding: int = 0, rows_each: int = 1
    ) -> Tensor | None:
        """As `RaggedPass.logits`. Captured passes have no long prompts, and their plan serves any number of sequences."""
        assert not prompts
        states = self.forward().last_hidden
        assert states is not None
        return head_logits(self._context.model, states[rows]) if len(rows) else None

    def run(self, spans: Sequence[Span]) -> ForwardOutput:
        """Computes `ModelRunner.forward`."""
        host = self.inputs.next_on_host(self.size)
        count, logit_rows = host.write(spans)
        self.on_device.copy(host, len(spans))
        self.inputs.mark_copied()
        self._logit_rows = torch.tensor(logit_rows, dtype=torch.int64).to(self._context.device, non_blocking=True)
        output = self.replay()
        states = output.last_hidden
        return ForwardOutput(
            output.logits,
            states[:count].clone() if self._kind.last_hidden and states is not None else None,
            {layer: rows[:count].clone() for layer, rows in output.hidden_by_layer.items()},
        )

    def replay(self) -> ForwardOutput:
        """Run the pass again with the same inputs. Hidden states of all rows, valid until the next run."""
        output, rows = self.forward(), self._logit_rows
        assert output.last_hidden is not None
        logits = head_logits(self._context.model, output.last_hidden[rows]) if len(rows) else None
        return ForwardOutput(logits, output.last_hidden, output.hidden_by_layer)
