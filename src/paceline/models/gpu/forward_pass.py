"""A pass of one size on a GPU, whose inputs stay where they are, so that a CUDA graph can hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels.layout import BLOCK_SIZE, AttentionLayout
from paceline.models.architectures.output import ForwardOutput
from paceline.models.cuda_graph import Graph, Stamp, staging
from paceline.models.gpu.decoder import gpu_forward
from paceline.models.runner import Span

if TYPE_CHECKING:
    from paceline.models.gpu.runner import GpuRunner


@dataclass(frozen=True, slots=True)
class PassKind:
    """What passes of one size differ in."""

    is_tree: bool = False
    capture: tuple[int, ...] = ()
    last_hidden: bool = False


class PaddedPass:
    """A pass over `batch` sequences of `rows` rows each, whose inputs stay where they are; at first all of it is padding."""

    def __init__(self, runner: "GpuRunner", batch: int, rows: int, is_tree: bool) -> None:
        self._runner, device = runner, runner.device
        # tokens, rotary positions, slots, ancestors; then for each sequence its context and its blocks
        self.longs = torch.zeros(4, batch * rows, dtype=torch.int64, device=device)
        self.ints = torch.zeros(batch, 1 + runner.table_width, dtype=torch.int32, device=device)
        self.longs[2] = runner.scratch_block * BLOCK_SIZE
        self.longs[3] = -1
        self.ints[:, 1:] = runner.scratch_block
        self._contexts = torch.empty(batch, dtype=torch.int32, device=device)
        self._layout = AttentionLayout(
            slots=self.longs[2],
            starts=torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device),
            context_lens=self._contexts,
            block_tables=self.ints[:, 1:],
            ancestors=self.longs[3] if is_tree else None,
        )
        self._every_row = torch.arange(batch * rows, device=device)
        self._plan = runner.plan(batch * rows, batch, rows)
        self._room = runner.rooms.logits(batch * rows)

    def forward(self, capture: tuple[int, ...] = (), last_hidden: bool = False) -> ForwardOutput:
        self._contexts.copy_(self.ints[:, 0])
        return gpu_forward(
            self._runner.model,
            self.longs[0],
            self.longs[1],
            self._layout,
            self._runner.cache,
            self._every_row,
            capture,
            last_hidden,
            self._plan,
            room=self._room,
        )


class PassGraph:
    """A padded pass, recorded once. Shorter spans and empty seats are padding."""

    def __init__(self, runner: "GpuRunner", batch: int, rows: int, kind: PassKind) -> None:
        self.runner, self.rows = runner, rows
        self._pass = one = PaddedPass(runner, batch, rows, kind.is_tree)
        self._host_longs = staging(*one.longs.shape, dtype=torch.int64, device=runner.device)
        self._host_ints = staging(*one.ints.shape, dtype=torch.int32, device=runner.device)
        room = runner.rooms.states(len(kind.capture) + kind.last_hidden, batch * rows)

        def compute() -> ForwardOutput:
            output = one.forward(kind.capture, kind.last_hidden)
            places = zip(kind.capture, room[: len(kind.capture)], strict=True)
            inner = {layer: place.copy_(output.inner[layer]) for layer, place in places}
            last = None if output.last_hidden is None else room[-1].copy_(output.last_hidden)
            return ForwardOutput(output.logits, last, inner)

        self._graph = Graph(compute, runner.device, runner.memory_pool)
        self._done = Stamp(runner.device)

    def run(self, spans: Sequence[Span]) -> ForwardOutput:
        """Logits as `ModelRunner.forward` gives them. They and hidden states are good until the next run."""
        chosen = self._fill(spans)
        self._pass.longs.copy_(self._host_longs, non_blocking=True)
        self._pass.ints.copy_(self._host_ints, non_blocking=True)
        output = self._graph.replay()
        self._done.record()
        logits = output.logits
        assert logits is not None
        if len(chosen) < len(logits):
            logits = logits[chosen] if len(chosen) else None
        own = torch.tensor([s * self.rows + i for s, span in enumerate(spans) for i in range(len(span.tokens))])
        own = own.to(self.runner.device, non_blocking=True)
        return ForwardOutput(
            logits,
            None if output.last_hidden is None else output.last_hidden[own],
            {layer: states[own] for layer, states in output.inner.items()},
        )

    def replay(self) -> None:
        """Run it again as it was."""
        self._graph.replay()

    def _fill(self, spans: Sequence[Span]) -> Tensor:
        """Write the inputs to host memory; the rows whose logits are wanted."""
        self._done.wait()  # the last run may still be reading
        scratch = self.runner.scratch_block
        longs, ints = self._host_longs.numpy(), self._host_ints.numpy()
        longs[:] = 0
        longs[2] = scratch * BLOCK_SIZE
        longs[3] = -1
        ints[:, 0] = 0
        ints[:, 1:] = scratch
        chosen: list[int] = []
        for s, span in enumerate(spans):
            count, first, blocks = len(span.tokens), span.context_len, span.blocks
            row = s * self.rows
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
            chosen.extend(range(row + count - span.num_logits, row + count))
        return torch.tensor(chosen, dtype=torch.int64, device=self.runner.device)
