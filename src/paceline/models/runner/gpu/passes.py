"""A pass of one size on a GPU, with inputs at fixed addresses, captured as a CUDA graph."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import AttentionLayout, PassSize
from paceline.models.decoder import ForwardOutput
from paceline.models.device import Graph, StreamEvent, staging_tensor
from paceline.models.runner import Span
from paceline.models.runner.gpu.workspace import PassContext


@dataclass(frozen=True, slots=True)
class PassKind:
    """Properties in which passes of one size differ."""

    is_tree: bool = False
    state_layers: tuple[int, ...] = ()
    last_hidden: bool = False


class PaddedPass:
    """A pass over `batch` sequences of `rows` rows each, with inputs at fixed addresses; at first all rows are padding."""

    def __init__(self, context: PassContext, batch: int, rows: int, is_tree: bool) -> None:
        self._context, device = context, context.device
        # longs: tokens, rotary positions, slots, ancestors; ints: context length and blocks of each sequence
        self.longs = torch.zeros(4, batch * rows, dtype=torch.int64, device=device)
        self.ints = torch.zeros(batch, 1 + context.table_width, dtype=torch.int32, device=device)
        self.longs[2] = context.scratch_block * BLOCK_SIZE
        self.longs[3] = -1
        self.ints[:, 1:] = context.scratch_block
        self._contexts = torch.empty(batch, dtype=torch.int32, device=device)
        self._layout = AttentionLayout(
            slots=self.longs[2],
            starts=torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device),
            context_lens=self._contexts,
            block_tables=self.ints[:, 1:],
            ancestors=self.longs[3] if is_tree else None,
        )
        self._every_row = torch.arange(batch * rows, device=device)
        self._size = PassSize(batch * rows, batch, rows, is_tree=is_tree)
        self._plan = context.plan(self._size)
        self._logits_out = context.workspace.logits(batch * rows)

    def forward(self, state_layers: tuple[int, ...] = (), last_hidden: bool = False) -> ForwardOutput:
        self._contexts.copy_(self.ints[:, 0])
        return self._context.forward(
            self._size,
            self._plan,
            self.longs[0],
            self.longs[1],
            self._layout,
            self._every_row,
            state_layers,
            last_hidden,
            logits_out=self._logits_out,
        )


class PassGraph:
    """A captured `PaddedPass`. Shorter spans and unused slots are padded."""

    def __init__(self, context: PassContext, batch: int, rows: int, kind: PassKind, is_warm: bool = False) -> None:
        self._context, self._rows = context, rows
        self._pass = padded = PaddedPass(context, batch, rows, kind.is_tree)
        self._host_longs = staging_tensor(*padded.longs.shape, dtype=torch.int64, device=context.device)
        self._host_ints = staging_tensor(*padded.ints.shape, dtype=torch.int32, device=context.device)
        states_out = context.workspace.states(len(kind.state_layers) + kind.last_hidden, batch * rows)

        def compute() -> ForwardOutput:
            output = padded.forward(kind.state_layers, kind.last_hidden)
            outs = zip(kind.state_layers, states_out[: len(kind.state_layers)], strict=True)
            inner = {layer: out.copy_(output.hidden_by_layer[layer]) for layer, out in outs}
            last = None if output.last_hidden is None else states_out[-1].copy_(output.last_hidden)
            return ForwardOutput(output.logits, last, inner)

        self._graph = Graph(compute, context.device, context.workspace.graph_pool, is_warm)
        self._done = StreamEvent(context.device)

    def run(self, spans: Sequence[Span]) -> ForwardOutput:
        """Computes `ModelRunner.forward`. Logits and hidden states are valid until the next run."""
        logit_rows = self._fill(spans)
        self._pass.longs.copy_(self._host_longs, non_blocking=True)
        self._pass.ints.copy_(self._host_ints, non_blocking=True)
        output = self._graph.replay()
        self._done.record()
        logits = output.logits
        assert logits is not None
        if len(logit_rows) < len(logits):
            logits = logits[logit_rows] if len(logit_rows) else None
        unpadded = torch.tensor([s * self._rows + i for s, span in enumerate(spans) for i in range(len(span.tokens))])
        unpadded = unpadded.to(self._context.device, non_blocking=True)
        return ForwardOutput(
            logits,
            None if output.last_hidden is None else output.last_hidden[unpadded],
            {layer: states[unpadded] for layer, states in output.hidden_by_layer.items()},
        )

    def replay(self) -> None:
        """Run the pass again with the same inputs."""
        self._graph.replay()

    def _fill(self, spans: Sequence[Span]) -> Tensor:
        """Write the inputs to host memory. Returns the rows whose logits are requested."""
        self._done.wait()  # the previous run may still be copying from it
        scratch = self._context.scratch_block
        longs, ints = self._host_longs.numpy(), self._host_ints.numpy()
        longs[:] = 0
        longs[2] = scratch * BLOCK_SIZE
        longs[3] = -1
        ints[:, 0] = 0
        ints[:, 1:] = scratch
        logit_rows: list[int] = []
        for s, span in enumerate(spans):
            count, first, blocks = len(span.tokens), span.context_len, span.blocks
            row = s * self._rows
            longs[0, row : row + count] = span.tokens
            longs[1, row : row + count] = range(first, first + count) if span.positions is None else span.positions
            longs[2, row : row + count] = [
                blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(first, first + count)
            ]
            if span.ancestors is not None:
                longs[3, row : row + count] = span.ancestors
            ints[s, 0] = first
            held = min(len(blocks), ints.shape[1] - 1)
            ints[s, 1 : 1 + held] = blocks[:held]
            logit_rows.extend(range(row + count - span.num_logits, row + count))
        return torch.tensor(logit_rows, dtype=torch.int64, device=self._context.device)
