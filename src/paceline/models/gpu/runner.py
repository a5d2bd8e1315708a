"""`ModelRunner` on a GPU: passes that recur are CUDA graphs, recorded when rehearsed or, small ones, first met; what fits none
runs eagerly."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.kernels.gpu.attention_plan import AttentionPlan, power_of_two
from paceline.kernels.gpu.linear import MAX_ROWS
from paceline.kernels.layout import BLOCK_SIZE, MAX_TREE_ROWS
from paceline.models.architectures.llama import DecoderModel
from paceline.models.architectures.output import ForwardOutput
from paceline.models.cuda_graph import MAX_GRAPH_ROWS, GraphPool, Stopwatch
from paceline.models.gpu.decoder import plan_pass
from paceline.models.gpu.forward_pass import PaddedPass, PassGraph, PassKind
from paceline.models.gpu.ragged import RaggedGraph, RaggedInputs
from paceline.models.gpu.ragged_size import RaggedSize, most_ragged_rows, ragged_size, ragged_sizes
from paceline.models.gpu.workspace import Rooms
from paceline.models.pass_sizes import around_16s, pass_sizes
from paceline.models.runner import ModelRunner, Span


def bucket(count: int) -> int:
    """The batch size a batch of `count` is padded to."""
    return power_of_two(count) if count <= 64 else -(-count // 64) * 64


def buckets(most: int) -> list[int]:
    """The sizes that batches of up to `most` are padded to."""
    return sorted({bucket(count) for count in range(1, most + 1)})


def recorded_passes(max_num_seqs: int, longest: int, kinds: Collection[PassKind]) -> list[tuple[int, int, PassKind]]:
    """(batch, rows, kind) of every pass that has a graph, the largest first."""
    return [
        (batch, rows, kind)
        for batch in reversed(buckets(max_num_seqs))
        for rows in reversed(buckets(min(MAX_GRAPH_ROWS // batch, longest)))
        for kind in kinds
        # A tree has few rows; one of several may lie beside a prompt
        if not kind.is_tree or 1 < rows <= MAX_TREE_ROWS or (rows > 1 and batch > 1)
    ]


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
        # HAZARD: as wide as the longest context and the padding after it, which kernels look up too
        longest = min(num_blocks, -(-model.config.max_position // BLOCK_SIZE))
        self.table_width = longest + MAX_GRAPH_ROWS // BLOCK_SIZE + 1
        self._graphs: dict[tuple[int, int, PassKind], PassGraph] = {}
        self._ragged: dict[tuple[RaggedSize, PassKind], RaggedGraph] = {}
        self._inputs = RaggedInputs(model.device, self.table_width)
        self.memory_pool = GraphPool(model.device)
        self.rooms = Rooms(model)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], capture: tuple[int, ...] = (), last_hidden: bool = False) -> ForwardOutput:
        graph = self._graph_of(spans, capture, last_hidden)
        return super().forward(spans, capture, last_hidden) if graph is None else graph.run(spans)

    @torch.inference_mode()
    def seconds(self, spans: Sequence[Span], clock: Clock) -> float:
        """Of the device alone: rounds that run ahead do not wait for the host."""
        graph = self._graph_of(spans)
        self.forward(spans)  # the device has work while the next is prepared, for the most part
        watch = Stopwatch(self.device)
        if graph is None:
            super().forward(spans)
        else:
            graph.replay()
        return watch.seconds()

    def _graph_of(
        self, spans: Sequence[Span], capture: tuple[int, ...] = (), last_hidden: bool = False
    ) -> PassGraph | RaggedGraph | None:
        """None: the pass fits no graph."""
        if self.after_layer is not None:  # a graph has no layers to stop at
            return None
        kind = PassKind(any(span.ancestors is not None for span in spans), capture, last_hidden)
        batch, rows = bucket(len(spans)), bucket(max(len(span.tokens) for span in spans))
        if batch * rows <= MAX_GRAPH_ROWS:
            return self._graph(batch, rows, kind)
        total = sum(len(span.tokens) for span in spans)
        return self._ragged.get((ragged_size(len(spans), total), kind))

    def _graph(self, batch: int, rows: int, kind: PassKind) -> PassGraph:
        key = batch, rows, kind
        if key not in self._graphs:
            self._graphs[key] = PassGraph(self, batch, rows, kind)
        return self._graphs[key]

    def record_ragged(self, max_num_seqs: int, max_rows: int, kinds: Collection[PassKind] = (PassKind(),)) -> None:
        """Passes of these kinds over spans of any lengths, as far as they are worth recording. There are too many to do it
        while somebody waits for one."""
        for kind in sorted(kinds, key=lambda kind: -len(kind.capture)):
            for size in ragged_sizes(max_num_seqs, min(max_rows, most_ragged_rows(self.model.weight_bytes))):
                if (size, kind) not in self._ragged:
                    self._ragged[size, kind] = RaggedGraph(self, self._inputs, size, kind)

    def plan(self, rows: int, sequences: int, max_rows: int) -> AttentionPlan:
        """As `plan_pass`. Passes with plans of one runner follow one another: they share their scratch too."""
        return plan_pass(self.model, rows, sequences, max_rows, self.rooms.attention)

    @torch.inference_mode()
    def rehearse(
        self, max_num_seqs: int, max_rows: int, longest: int, kinds: Collection[PassKind] = (PassKind(),)
    ) -> None:
        """Passes of these kinds, over up to so many sequences, rows, and rows of a sequence: their kernels are compiled and
        their graphs recorded now, not when somebody waits for them. All of it is padding."""
        longest = min(longest, self.model.config.max_position)  # a draft's window may be shorter than its target's
        has_trees = any(kind.is_tree for kind in kinds)
        recorded = recorded_passes(max_num_seqs, longest, kinds)
        # Kernels first, then graphs: in turns, a start was seen to take longer; why was not looked into
        for batch, rows, is_tree in dict.fromkeys((batch, rows, kind.is_tree) for batch, rows, kind in recorded):
            PaddedPass(self, batch, rows, is_tree).forward()
        for count, rows in pass_sizes(max_num_seqs, max_rows, longest):
            super().forward([self._padding(rows)] * count)
            # Two: one of them a tree, the other a prompt, whose rows have masks then
            if has_trees and rows > 1 and (rows <= MAX_TREE_ROWS or count == 2):
                super().forward([replace(self._padding(rows), ancestors=[-1] * rows)] * count)
        # The head's has as many rows as there are drafts, in passes of few rows and of many
        most = min(max_rows, longest)
        for wanted in around_16s(min(most, MAX_GRAPH_ROWS)):
            for rows in sorted({wanted, min(most, wanted + MAX_ROWS)}):
                super().forward([self._padding(rows, wanted)])
        if bucket(max_num_seqs) * bucket(longest) > MAX_GRAPH_ROWS:
            self.record_ragged(max_num_seqs, max_rows, kinds)
        for size in recorded:
            self._graph(*size)

    def _padding(self, rows: int, num_logits: int = 1) -> Span:
        return Span([self.scratch_block] * -(-rows // BLOCK_SIZE), 0, [0] * rows, num_logits)

    def sharing(self, model: DecoderModel) -> "GpuRunner":
        runner = GpuRunner(model, self.num_blocks, cache=self.cache[: model.config.num_layers])
        runner.rooms, runner.memory_pool = self.rooms, self.memory_pool
        return runner
