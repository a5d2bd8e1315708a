"""Forward passes whose row positions the device computes from the lengths of the sequences."""

import torch
from torch import Tensor

from paceline.kernels.formats.layout import AttentionLayout, PassSize
from paceline.kernels.gpu.speculation.rows import place_rows
from paceline.kernels.gpu.speculation.tree_rows import place_trees, tree_places
from paceline.models.decoder import ForwardOutput
from paceline.models.runner.gpu import GpuRunner


class ChainRows:
    """`rows` consecutive rows of every slot of a batch."""

    def __init__(
        self, runner: GpuRunner, tables: Tensor, batch: int, rows: int, logits_out: Tensor | None = None
    ) -> None:
        """`logits_out` is shared memory for the logits, valid until the next pass that writes there."""
        device = runner.device
        self._logits_out = logits_out
        self._runner, self._tables, self._rows = runner, tables, rows
        self.positions = torch.zeros(batch * rows, dtype=torch.int64, device=device)
        self._slots = torch.zeros_like(self.positions)
        self._contexts = torch.zeros(batch, dtype=torch.int32, device=device)
        starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)
        self._layout = AttentionLayout(self._slots, starts, self._contexts, tables)
        self._every = torch.arange(batch * rows, device=device)
        self._last = self._every[rows - 1 :: rows].contiguous()
        self._size = PassSize(batch * rows, batch, rows)
        self._plan = runner.context.plan(self._size)

    def forward(
        self, tokens: Tensor, lengths: Tensor, offset: int, state_layers: tuple[int, ...] = (), last_only: bool = False
    ) -> ForwardOutput:
        """Logits of all rows, or of the last row of each slot; the first row is at position length + offset."""
        wanted, runner = self._last if last_only else self._every, self._runner
        most = runner.model.config.max_position
        place_rows(lengths, offset, self._tables, self._contexts, self.positions, self._slots, most)
        return runner.context.forward(
            self._size,
            self._plan,
            tokens,
            self.positions,
            self._layout,
            wanted,
            state_layers,
            logits_out=self._logits_out,
        )

    def next_positions(self) -> Tensor:
        """Positions of the tokens that follow the last row of each slot."""
        return self.positions[self._rows - 1 :: self._rows] + 1


class TreeRows:
    """The last committed token of every slot and a tree of `nodes` nodes after it, at most `levels` deep."""

    def __init__(self, runner: GpuRunner, tables: Tensor, drafted: Tensor, nodes: int, levels: int) -> None:
        """`drafted` [batch] int32: receives the levels of the trees."""
        device, batch = runner.device, len(drafted)
        rows = batch * (1 + nodes)
        self._runner, self._tables, self._levels = runner, tables, levels
        self.places = tree_places(batch, nodes, drafted)
        starts = torch.arange(0, rows + 1, 1 + nodes, dtype=torch.int32, device=device)
        self._layout = AttentionLayout(self.places.slots, starts, self.places.contexts, tables, self.places.ancestors)
        self._every = torch.arange(rows, device=device)
        self._size = PassSize(rows, batch, 1 + nodes, is_tree=True)
        self._plan = runner.context.plan(self._size)
        self._logits_out = runner.workspace.logits(rows)

    @property
    def positions(self) -> Tensor:
        return self.places.positions

    def forward(
        self, tokens: Tensor, lengths: Tensor, parents: Tensor, limits: Tensor, state_layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Logits of all rows."""
        runner = self._runner
        most = runner.model.config.max_position
        place_trees(lengths, parents, limits, self._levels, self._tables, self.places, most)
        return runner.context.forward(
            self._size,
            self._plan,
            tokens,
            self.positions,
            self._layout,
            self._every,
            state_layers,
            logits_out=self._logits_out,
        )
