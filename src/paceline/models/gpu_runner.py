"""`ModelRunner` on a GPU: passes that recur are CUDA graphs, captured when first met; what fits none runs eagerly."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.gpu.attention_plan import AttentionPlan, AttentionScratch, power_of_two
from paceline.kernels.gpu.linear import MAX_ROWS
from paceline.kernels.layout import BLOCK_SIZE, MAX_TREE_ROWS
from paceline.models.gpu_decoder import plan_pass
from paceline.models.gpu_pass import PaddedPass, PassGraph
from paceline.models.graph import GraphPool
from paceline.models.llama import DecoderModel
from paceline.models.output import ForwardOutput
from paceline.models.runner import ModelRunner, Span

MAX_GRAPH_ROWS = 512
"""Rows of the largest pass that is worth a graph: beyond, launches hide behind the work."""


def bucket(count: int) -> int:
    """The batch size a batch of `count` is padded to."""
    return power_of_two(count) if count <= 64 else -(-count // 64) * 64


def buckets(most: int) -> list[int]:
    """The sizes that batches of up to `most` are padded to."""
    return sorted({bucket(count) for count in range(1, most + 1)})


def _powers_of_two(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


def _around_16s(most: int) -> list[int]:
    """16, 32, 64, … and one less."""
    return [size for power in _powers_of_two(most)[4:] for size in (power - 1, power)]


class GpuRunner(ModelRunner):
    """One block more than the books know of: padding writes there, and nobody reads it."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        kv_dtype: torch.dtype | None = None,
        cache: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(model, num_blocks + 1, kv_dtype, cache)
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        # As wide as the longest context and the padding after it
        self.table_width = (
            min(num_blocks, -(-model.config.max_position // BLOCK_SIZE)) + MAX_TREE_ROWS // BLOCK_SIZE + 1
        )
        self._graphs: dict[tuple[int, int, bool, tuple[int, ...], bool], PassGraph] = {}
        self.memory_pool = GraphPool(model.device)
        self._room: Tensor | None = None
        self._scratch = AttentionScratch(model.device)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], capture: tuple[int, ...] = (), last_hidden: bool = False) -> ForwardOutput:
        batch, rows = bucket(len(spans)), bucket(max(len(span.tokens) for span in spans))
        is_watched = self.after_layer is not None  # a graph has no layers to stop at
        if is_watched or batch * rows > MAX_GRAPH_ROWS or not all(span.num_logits for span in spans):
            return super().forward(spans, capture, last_hidden)
        is_tree = any(span.ancestors is not None for span in spans)
        key = (batch, rows, is_tree, capture, last_hidden)
        if key not in self._graphs:
            self._graphs[key] = PassGraph(self, *key)
        return self._graphs[key].run(spans)

    def logits_room(self, rows: int) -> Tensor:
        """[rows, V] float32, one for all passes that run one after another: a graph that kept logits of its own would keep them
        for good, and there are many graphs."""
        if self._room is None or len(self._room) < rows:
            shape = power_of_two(rows), self.model.head.shape[0]
            self._room = torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._room[:rows]

    def plan(self, rows: int, sequences: int, max_rows: int) -> AttentionPlan:
        """As `plan_pass`. Passes with plans of one runner follow one another: they share their scratch too."""
        return plan_pass(self.model, rows, sequences, max_rows, self._scratch)

    @torch.inference_mode()
    def rehearse(self, max_num_seqs: int, max_rows: int, longest: int, has_trees: bool = False) -> None:
        """Passes of every kind that makes a difference, over up to so many sequences, rows, and rows of a sequence: their
        kernels are compiled now, not when somebody waits for them. All of it is padding."""
        longest = min(longest, self.model.config.max_position)  # a draft's window may be shorter than its target's
        for batch in buckets(max_num_seqs):
            for rows in _powers_of_two(min(MAX_GRAPH_ROWS // batch, longest)):
                PaddedPass(self, batch, rows, is_tree=False).forward()
                if has_trees and 1 < rows <= MAX_TREE_ROWS:
                    PaddedPass(self, batch, rows, is_tree=True).forward()
        # Products have a kernel for each multiple of 16 they are padded to, and another where nothing is
        for count in sorted({min(count, max_num_seqs) for count in (1, 2, *_around_16s(2 * max_num_seqs))}):
            most = min(max_rows // count, longest)
            for rows in sorted({1, 2, most, *_around_16s(most)}):
                super().forward([self._padding(rows)] * count)
                # Two: one of them a tree, the other a prompt, whose rows have masks then
                if has_trees and rows > 1 and (rows <= MAX_TREE_ROWS or count == 2):
                    super().forward([replace(self._padding(rows), ancestors=[-1] * rows)] * count)
        # The head's has as many rows as there are drafts, in passes of few rows and of many
        most = min(max_rows, longest)
        for wanted in _around_16s(min(most, MAX_GRAPH_ROWS)):
            for rows in sorted({wanted, min(most, wanted + MAX_ROWS)}):
                super().forward([self._padding(rows, wanted)])

    def _padding(self, rows: int, num_logits: int = 1) -> Span:
        return Span([self.scratch_block] * -(-rows // BLOCK_SIZE), 0, [0] * rows, num_logits)

    def sharing(self, model: DecoderModel) -> "GpuRunner":
        return GpuRunner(model, self.num_blocks, cache=self.cache[: model.config.num_layers])
