"""Runs an EAGLE head over ragged spans and a paged cache of its own, with lanes for the branches of trees."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.drafts.eagle import EagleModel
from paceline.models.pass_sizes import pass_sizes
from paceline.models.runner import Span, lay_out

LANE_BLOCKS = 2
"""Blocks of a lane: the tail of a sequence, less than a block, and then up to `MAX_BRANCH` slots."""
MAX_BRANCH = (LANE_BLOCKS - 1) * BLOCK_SIZE
"""Slots a branch may add to its sequence."""


class EagleRunner:
    """A head and the memory of its keys and values: `num_blocks` for committed slots, and after them the lanes.

    A drafted slot must see its sequence and its own branch, not the other branches. So each branch that grows has a lane, a
    private copy of everything past the last full block, and is a sequence of its own to the attention.
    """

    def __init__(self, model: EagleModel, num_blocks: int, num_lanes: int) -> None:
        self.model = model
        self.num_blocks = num_blocks
        self.num_lanes = num_lanes
        shape = (num_blocks + num_lanes * LANE_BLOCKS, BLOCK_SIZE, model.config.num_kv_heads, model.config.head_dim)
        # Zeroed, so that no masked-out slot can ever hold a NaN.
        self.cache = (
            torch.zeros(shape, dtype=model.dtype, device=model.device),
            torch.zeros(shape, dtype=model.dtype, device=model.device),
        )

    def lane(self, number: int) -> list[int]:
        """The lane's blocks."""
        first = self.num_blocks + number * LANE_BLOCKS
        return list(range(first, first + LANE_BLOCKS))

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], states: Tensor) -> Tensor:
        """[T, D] from states [T, D], in span order. A span's tokens are those that followed its states."""
        rows = lay_out(spans, self.model.device)
        return self.model.forward(states, rows.tokens, rows.positions, rows.layout, self.cache)

    @torch.inference_mode()
    def rehearse(self, max_num_seqs: int, max_rows: int, longest: int) -> None:
        """Passes over up to so many sequences, rows, and rows of a sequence, and one row for each lane: kernels of a GPU are
        compiled now, not when somebody waits for them. They write to a lane, whose slots nobody reads before writing."""
        scratch = self.lane(0)[:1]
        longest = min(longest, len(self.model.cos))
        sizes = {*pass_sizes(max_num_seqs, max_rows, longest), *pass_sizes(self.num_lanes, self.num_lanes, 1)}
        for count, rows in sorted(sizes):
            padding = Span(scratch * -(-rows // BLOCK_SIZE), 0, [0] * rows, 0)
            states = self.model.hidden_norm.new_zeros(count * rows, self.model.config.hidden_size)
            self.model.logits(self.forward([padding] * count, states)[:count])

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Whole blocks, all read before any is written."""
        if not sources:
            return
        source, target = (torch.tensor(blocks, device=self.model.device) for blocks in (sources, targets))
        for values in self.cache:
            values[target] = values[source]
