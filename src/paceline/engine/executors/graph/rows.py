"""Passes of a model over rows that are placed on the device, by how long its sequences are."""

import torch
from torch import Tensor

from paceline.kernels.gpu.speculation.rows import place_rows
from paceline.kernels.gpu.speculation.tree_rows import place_trees, tree_places
from paceline.kernels.layout import AttentionLayout
from paceline.models.architectures.output import ForwardOutput
from paceline.models.gpu.decoder import gpu_forward
from paceline.models.gpu.runner import GpuRunner


class ChainRows:
    """`rows` consecutive rows of every sequence of a batch."""

    def __init__(self, runner: GpuRunner, tables: Tensor, batch: int, rows: int, room: Tensor | None = None) -> None:
        """Logits are written to `room` if there is one: then they are good until somebody else writes there."""
        device = runner.device
        self._room = room
        self._runner, self._tables, self._rows = runner, tables, rows
        self.positions = torch.zeros(batch * rows, dtype=torch.int64, device=device)
        self._slots = torch.zeros_like(self.positions)
        self._contexts = torch.zeros(batch, dtype=torch.int32, device=device)
        starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=device)
        self._layout = AttentionLayout(self._slots, starts, self._contexts, tables)
        self._every = torch.arange(batch * rows, device=device)
        self._last = self._every[rows - 1 :: rows].contiguous()
        self._plan = runner.plan(batch * rows, batch, rows)

    def forward(
        self, tokens: Tensor, lengths: Tensor, offset: int, capture: tuple[int, ...] = (), last_only: bool = False
    ) -> ForwardOutput:
        """Logits of all rows, or of each sequence's last; the first row lies at logical index length + offset."""
        wanted, runner = self._last if last_only else self._every, self._runner
        most = runner.model.config.max_position
        place_rows(lengths, offset, self._tables, self._contexts, self.positions, self._slots, most)
        return gpu_forward(
            runner.model,
            tokens,
            self.positions,
            self._layout,
            runner.cache,
            wanted,
            capture,
            plan=self._plan,
            room=self._room,
        )

    def next_positions(self) -> Tensor:
        """Of the tokens that follow each sequence's last row."""
        return self.positions[self._rows - 1 :: self._rows] + 1


class TreeRows:
    """The last committed token of every sequence and `nodes` nodes of a tree after it, at most `levels` deep."""

    def __init__(self, runner: GpuRunner, tables: Tensor, drafted: Tensor, nodes: int, levels: int) -> None:
        """`drafted` [batch] int32: each pass writes the levels of the trees there."""
        device, batch = runner.device, len(drafted)
        rows = batch * (1 + nodes)
        self._runner, self._tables, self._levels = runner, tables, levels
        self.places = tree_places(batch, nodes, drafted)
        starts = torch.arange(0, rows + 1, 1 + nodes, dtype=torch.int32, device=device)
        self._layout = AttentionLayout(self.places.slots, starts, self.places.contexts, tables, self.places.ancestors)
        self._every = torch.arange(rows, device=device)
        self._plan = runner.plan(rows, batch, 1 + nodes)
        self._room = runner.rooms.logits(rows)

    @property
    def positions(self) -> Tensor:
        return self.places.positions

    def forward(
        self, tokens: Tensor, lengths: Tensor, parents: Tensor, limits: Tensor, capture: tuple[int, ...]
    ) -> ForwardOutput:
        """Logits of all rows."""
        runner = self._runner
        most = runner.model.config.max_position
        place_trees(lengths, parents, limits, self._levels, self._tables, self.places, most)
        return gpu_forward(
            runner.model,
            tokens,
            self.positions,
            self._layout,
            runner.cache,
            self._every,
            capture,
            plan=self._plan,
            room=self._room,
        )
