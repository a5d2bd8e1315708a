"""`ModelRunner` on a GPU. Passes run as CUDA graphs, captured by `warm_up` or, if they are small, at first use.

A pass that fits no graph runs eagerly.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.cpu.decoder import Sampler
from paceline.kernels.formats.layout import MAX_TREE_ROWS, AfterLayer
from paceline.kernels.gpu.linear import MAX_ROWS
from paceline.kernels.gpu.products import sum_in_one_part
from paceline.kernels.gpu.speculation.tree_rows import CacheAddresses, move_paths
from paceline.models.decoder import DecoderModel, ForwardOutput, head_logits
from paceline.models.device import MAX_GRAPH_ROWS, GraphPool, StreamTimer
from paceline.models.runner import ModelRunner, Span, around_16s, early_exit, warm_up_sizes
from paceline.models.runner.gpu.passes import PaddedPass, PassGraph, PassKind
from paceline.models.runner.gpu.ragged import (
    RaggedGraph,
    RaggedInputs,
    RaggedPass,
    RaggedSize,
    max_captured_rows,
    ragged_size,
    ragged_sizes,
)
from paceline.models.runner.gpu.workspace import PassContext, PassLeader, Workspace
from paceline.policy.step import padded_size


def padded_sizes(most: int) -> list[int]:
    """Batch sizes that batches of up to `most` are padded to."""
    return sorted({padded_size(count) for count in range(1, most + 1)})


def captured_passes(max_num_seqs: int, longest: int, kinds: Collection[PassKind]) -> list[tuple[int, int, PassKind]]:
    """(batch, rows, kind) of every padded pass that has a graph, the largest first."""
    return [
        (batch, rows, kind)
        for batch in reversed(padded_sizes(max_num_seqs))
        for rows in reversed(padded_sizes(min(MAX_GRAPH_ROWS // batch, longest)))
        for kind in kinds
        # A tree has few rows; in a batch with a prompt it is padded to more
        if not kind.is_tree or 1 < rows <= MAX_TREE_ROWS or (rows > 1 and batch > 1)
    ]


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Limits of the passes of a runner."""

    max_num_seqs: int
    max_rows: int
    longest: int
    """Most rows of one sequence."""
    kinds: frozenset[PassKind]


class GpuRunner(ModelRunner):
    """A `ModelRunner` with CUDA graphs. Its cache has one more block than the block pool, for padding to write to."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        kv_dtype: torch.dtype | None = None,
        cache: Sequence[tuple[Tensor, Tensor]] | None = None,
        workspace: Workspace | None = None,
        weights_id: str = "",
        leader: PassLeader | None = None,
    ) -> None:
        """`leader` is that of a model that is divided among ranks."""
        super().__init__(model, num_blocks + 1, kv_dtype, cache, weights_id)
        if model.device.type == "cuda":
            sum_in_one_part()
        self.num_blocks = num_blocks
        self.scratch_block = num_blocks
        # HAZARD: wide enough for the longest context and the padding after it, which kernels look up too
        longest = min(num_blocks, -(-model.config.max_position // BLOCK_SIZE))
        self.table_width = longest + MAX_GRAPH_ROWS // BLOCK_SIZE + 1
        self._graphs: dict[tuple[int, int, PassKind], PassGraph] = {}
        self._ragged: dict[tuple[RaggedSize, PassKind], RaggedGraph] = {}
        self._inputs = RaggedInputs(model.device, self.table_width)
        self._loaded: set[tuple[int, int, PassKind] | tuple[RaggedSize, PassKind]] = set()
        """Passes whose kernels are loaded."""
        self.workspace = workspace or Workspace(model)
        self.context = PassContext(model, self.cache, self.workspace, self.table_width, self.scratch_block, leader)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return head_logits(self.model, hidden)

    @torch.inference_mode()
    def forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
        samplers: Sequence[Sampler] | None = None,
    ) -> ForwardOutput:
        # A graph cannot stop after a layer
        graph = self._graph_of(spans, state_layers, last_hidden) if after_layer is None else None
        return (
            super().forward(spans, state_layers, last_hidden, after_layer, samplers)
            if graph is None
            else graph.run(spans)
        )

    @torch.inference_mode()
    def measure_seconds(self, spans: Sequence[Span], clock: Clock) -> float:
        """Device time of one pass over `spans`, without the time of the host. A pass that serving runs as a graph is captured
        for it: the kernels of a small model take longer to launch than to run."""
        num_rows = sum(len(span.tokens) for span in spans)
        if self.padded_shape(spans) is None and num_rows <= max_captured_rows(self.model.weight_bytes):
            self._capture_ragged(ragged_size(len(spans), num_rows), PassKind())
        graph = self._graph_of(spans)
        self.forward(spans)  # keeps the device busy while the host prepares the next pass
        timer = StreamTimer(self.device)
        if graph is None:
            super().forward(spans)
        else:
            graph.replay()
        return timer.seconds()

    def padded_shape(self, spans: Sequence[Span]) -> tuple[int, int] | None:
        batch, rows = padded_size(len(spans)), padded_size(max(len(span.tokens) for span in spans))
        return (batch, batch * rows) if batch * rows <= MAX_GRAPH_ROWS else None

    def _graph_of(
        self, spans: Sequence[Span], state_layers: tuple[int, ...] = (), last_hidden: bool = False
    ) -> PassGraph | RaggedGraph | None:
        """The graph for this pass. None if it fits no graph."""
        kind = PassKind(any(span.ancestors is not None for span in spans), state_layers, last_hidden)
        if (padded := self.padded_shape(spans)) is not None:
            batch, rows = padded
            return self._graph(batch, rows // batch, kind)
        total = sum(len(span.tokens) for span in spans)
        return self._ragged.get((ragged_size(len(spans), total), kind))

    def captured_ragged(self, sequences: int, rows: int) -> RaggedGraph | None:
        """The graph of a ragged pass without trees and hidden states. None if there is no graph of this size."""
        return self._ragged.get((ragged_size(sequences, rows), PassKind()))

    def _graph(self, batch: int, rows: int, kind: PassKind) -> PassGraph:
        key = batch, rows, kind
        if key not in self._graphs:
            self._graphs[key] = PassGraph(self.context, batch, rows, kind, key in self._loaded)
        return self._graphs[key]

    def capture_ragged(self, max_num_seqs: int, max_rows: int, kinds: Collection[PassKind] = (PassKind(),)) -> None:
        """Capture ragged passes of these kinds up to `max_captured_rows`. They are too many to capture at first use."""
        for size, kind in self._ragged_passes(max_num_seqs, max_rows, kinds):
            self._capture_ragged(size, kind)

    def _capture_ragged(self, size: RaggedSize, kind: PassKind) -> None:
        key = size, kind
        if key not in self._ragged:
            self._ragged[key] = RaggedGraph(self.context, self._inputs, size, kind, key in self._loaded)

    def _ragged_passes(
        self, max_num_seqs: int, max_rows: int, kinds: Collection[PassKind]
    ) -> list[tuple[RaggedSize, PassKind]]:
        most = min(max_rows, max_captured_rows(self.model.weight_bytes))
        widest_first = sorted(kinds, key=lambda kind: -len(kind.state_layers))
        return [(size, kind) for kind in widest_first for size in ragged_sizes(max_num_seqs, most)]

    @torch.inference_mode()
    def move_paths(self, contexts: Tensor, block_tables: Tensor, rows: Tensor, counts: Tensor, rows_each: int) -> None:
        """Runs the kernel `move_paths` on this cache. `rows_each` is the number of rows of a tree in the pass."""
        move_paths(self._addresses, contexts, block_tables, rows, counts, rows_each)

    @torch.inference_mode()
    def warm_up(
        self, max_num_seqs: int, max_rows: int, longest: int, kinds: Collection[PassKind] = (PassKind(),)
    ) -> None:
        """Load the kernels and capture the graphs of passes of these kinds within these limits, over padding rows. `longest` is
        the most rows of one sequence."""
        limits = PassLimits(max_num_seqs, max_rows, longest, frozenset(kinds))
        self.load_kernels(limits)
        for capture in self.captures(limits):
            capture()

    @torch.inference_mode()
    def load_kernels(self, limits: PassLimits) -> None:
        """Load, or compile, the kernels of all passes within these limits: run them over padding rows with the first layer
        alone. All layers use the same kernels."""
        first = early_exit(self, 1)
        assert isinstance(first, GpuRunner)
        padded, ragged = self._captured(limits)
        with self.graph_pool.on_stream():  # captures need the memory that kernels get at their first launch in a stream
            for batch, rows, kind in padded:
                PaddedPass(first.context, batch, rows, kind.is_tree).forward((), kind.last_hidden)
            for size, kind in ragged:
                RaggedPass(first.context, first._inputs, size, kind).forward()
            first._run_eagerly(limits)
        self._loaded |= {*padded, *ragged}

    def captures(self, limits: PassLimits) -> list[Callable[[], object]]:
        """The captures of all passes within these limits. Each takes milliseconds."""
        padded, ragged = self._captured(limits)
        run = torch.inference_mode()
        return [
            *(run(partial(self._capture_ragged, size, kind)) for size, kind in ragged),
            *(run(partial(self._graph, *size)) for size in padded),
        ]

    def _captured(
        self, limits: PassLimits
    ) -> tuple[list[tuple[int, int, PassKind]], list[tuple[RaggedSize, PassKind]]]:
        """Padded and ragged passes that have graphs."""
        longest = self._longest(limits)
        padded = captured_passes(limits.max_num_seqs, longest, limits.kinds)
        if padded_size(limits.max_num_seqs) * padded_size(longest) <= MAX_GRAPH_ROWS:
            return padded, []
        return padded, self._ragged_passes(limits.max_num_seqs, limits.max_rows, limits.kinds)

    def _run_eagerly(self, limits: PassLimits) -> None:
        """Run passes that together use every kernel of passes without a graph."""
        has_trees, longest = any(kind.is_tree for kind in limits.kinds), self._longest(limits)
        for count, rows in warm_up_sizes(limits.max_num_seqs, limits.max_rows, longest):
            super().forward([self._padding(rows)] * count)
            # A batch of two may hold a tree and a prompt, whose rows then have masks too
            if has_trees and rows > 1 and (rows <= MAX_TREE_ROWS or count == 2):
                super().forward([replace(self._padding(rows), ancestors=[-1] * rows)] * count)
        # The head computes as many rows as there are drafts, after passes of few rows and of many
        most = min(limits.max_rows, longest)
        for num_logits in around_16s(min(most, MAX_GRAPH_ROWS)):
            for rows in sorted({num_logits, min(most, num_logits + MAX_ROWS)}):
                super().forward([self._padding(rows, num_logits)])

    def _longest(self, limits: PassLimits) -> int:
        """Rows of one sequence. The context window of a draft may be shorter than the target's."""
        return min(limits.longest, self.model.config.max_position)

    def _padding(self, rows: int, num_logits: int = 1) -> Span:
        return Span([self.scratch_block] * -(-rows // BLOCK_SIZE), 0, [0] * rows, num_logits)

    def share_cache(self, model: DecoderModel) -> "GpuRunner":
        return GpuRunner(model, self.num_blocks, None, self.cache[: model.config.num_layers], self.workspace)

    def with_cache(self, model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None) -> "GpuRunner":
        return GpuRunner(model, num_blocks, kv_dtype)

    @cached_property
    def _addresses(self) -> CacheAddresses:
        return CacheAddresses(self.cache)

    @property
    def graph_pool(self) -> GraphPool:
        """Memory of all graphs of this runner."""
        return self.workspace.graph_pool
