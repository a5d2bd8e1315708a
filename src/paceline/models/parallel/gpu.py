"""Runs a tensor-parallel model on GPUs.

`Leader` is rank 0's side of device work that all ranks do: passes, and moves of accepted paths. Rank 0 sends the inputs of this
work to the other ranks in one vector of 64-bit numbers; the `_values` and `_inputs` functions write and read it. `Follower` is
the side of the other ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.kernels.formats.layout import AfterLayer, AttentionLayout, PassSize
from paceline.kernels.gpu.attention.plan import AttentionPlan
from paceline.kernels.gpu.speculation.tree_rows import CacheAddresses, move_paths
from paceline.models.decoder import DecoderModel, ForwardOutput, gpu_forward, plan_pass
from paceline.models.device import Graph, graph_in_capture
from paceline.models.parallel.commands import DeviceMove, DevicePass, Follow
from paceline.models.parallel.group import RankGroup
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.runner import RankCache, RankCacheOwner
from paceline.models.runner import Cache, Span, build_inputs, first_layers
from paceline.models.runner.gpu import GpuRunner, Workspace


@dataclass(frozen=True, slots=True, eq=False)
class PassInputs:
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    layout: AttentionLayout


@dataclass(frozen=True, slots=True, eq=False)
class MoveInputs:
    """See `move_paths`."""

    contexts: Tensor  # [S] int32
    block_tables: Tensor  # [S, W] int32
    rows: Tensor  # [S, L + 1] int64
    counts: Tensor  # [S] int32


def pass_values(inputs: PassInputs) -> Tensor:
    """[N] int64. Slots are left out: ranks look them up in the block tables."""
    layout = inputs.layout
    trees = () if layout.ancestors is None else (layout.ancestors,)
    ints = layout.starts, layout.context_lens, layout.block_tables
    return _joined([inputs.tokens, inputs.positions, *trees, *ints])


def pass_inputs(values: Tensor, work: DevicePass) -> PassInputs:
    size, parts = work.size, _Parts(values)
    tokens, positions = parts.longs(size.rows), parts.longs(size.rows)
    ancestors = parts.longs(size.rows) if work.size.is_tree else None
    starts, contexts = parts.ints(size.sequences + 1), parts.ints(size.sequences)
    tables = parts.ints(size.sequences, work.table_width)
    return PassInputs(
        tokens, positions, AttentionLayout(tokens, starts, contexts, tables, ancestors, work.long_prompts)
    )


def move_values(inputs: MoveInputs) -> Tensor:
    """[N] int64"""
    return _joined([inputs.contexts, inputs.block_tables, inputs.rows, inputs.counts])


def move_inputs(values: Tensor, work: DeviceMove) -> MoveInputs:
    parts, trees = _Parts(values), work.trees
    contexts, tables = parts.ints(trees), parts.ints(trees, work.table_width)
    return MoveInputs(contexts, tables, parts.longs(trees, work.path_rows), parts.ints(trees))


def count_values(work: DevicePass | DeviceMove) -> int:
    """Length of the vector."""
    if isinstance(work, DeviceMove):
        return work.trees * (2 + work.table_width + work.path_rows)
    return (2 + work.size.is_tree) * work.size.rows + work.size.sequences * (2 + work.table_width) + 1


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1).long() for part in parts])


class _Parts:
    """Takes the parts of a vector in their order. Each is a tensor of its own: kernels expect aligned addresses."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._at = values, 0

    def longs(self, *shape: int) -> Tensor:
        return self._next(*shape).clone()

    def ints(self, *shape: int) -> Tensor:
        return self._next(*shape).int()

    def _next(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        self._at += count
        return self._values[self._at - count : self._at].view(shape)


class Leader:
    """Lets the other ranks follow the passes over one cache with the first `num_layers` layers.

    The host of rank 0 tells the other ranks what to launch. The inputs follow from device to device, inside the work: the sum
    over all ranks of a vector that is zero on all ranks but rank 0. If the work is captured, the other ranks capture it too,
    and every replay is announced.
    """

    def __init__(self, cache: RankCache, num_layers: int) -> None:
        self._cache, self._num_layers = cache, num_layers

    def begin_pass(self, size: PassSize, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> None:
        """Let the other ranks begin this pass."""
        assert size.is_tree == (layout.ancestors is not None)
        work = DevicePass(size, layout.block_tables.shape[1], layout.long_prompts, self._num_layers, self._cache.number)
        self._lead(work, pass_values(PassInputs(tokens, positions, layout)))

    def begin_move(self, inputs: MoveInputs, rows_each: int) -> None:
        """Let the other ranks move these paths. `rows_each` is the number of rows of a tree."""
        trees, path_rows = inputs.rows.shape
        work = DeviceMove(trees, rows_each, path_rows, inputs.block_tables.shape[1], self._cache.number)
        self._lead(work, move_values(inputs))

    def _lead(self, work: DevicePass | DeviceMove, values: Tensor) -> None:
        graph, ranks = graph_in_capture(), self._cache.ranks
        if graph is None:
            self._cache.follow("run", work)
        else:
            self._cache.follow("capture", work)
            graph.before_replay.append(partial(self._cache.follow, "replay", work))
        with ranks.report_lost_ranks():
            ranks.group.sum(values)


class ParallelGpuRunner(RankCacheOwner, GpuRunner):
    """A `GpuRunner` whose passes all ranks compute together, as CUDA graphs on every rank."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        ranks: Ranks,
        kv_dtype: torch.dtype | None = None,
        weights_id: str = "",
        shared: "ParallelGpuRunner | None" = None,
    ) -> None:
        """`shared` is a runner of the same model, whose cache this runner shares."""
        self.ranks, self._is_owner = ranks, shared is None
        # One block more, for padding
        self._rank_cache = RankCache(ranks, num_blocks + 1, kv_dtype) if shared is None else shared._rank_cache
        self._leader = Leader(self._rank_cache, model.config.num_layers)
        cache = None if shared is None else shared.cache[: model.config.num_layers]
        workspace = None if shared is None else shared.workspace
        super().__init__(model, num_blocks, kv_dtype, cache, workspace, weights_id, self._leader)

    @torch.inference_mode()
    def _forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...],
        last_hidden: bool,
        after_layer: AfterLayer | None,
    ) -> ForwardOutput:
        inputs = build_inputs(spans, self.device)
        is_tree = inputs.layout.ancestors is not None
        size = PassSize(len(inputs.tokens), len(spans), len(inputs.tokens), is_tree=is_tree)
        return self.context.forward(
            size,
            self.context.plan(size),
            inputs.tokens,
            inputs.positions,
            inputs.layout,
            inputs.logit_rows,
            state_layers,
            last_hidden,
            after_layer,
        )

    def move_paths(self, contexts: Tensor, block_tables: Tensor, rows: Tensor, counts: Tensor, rows_each: int) -> None:
        self._leader.begin_move(MoveInputs(contexts, block_tables, rows, counts), rows_each)
        super().move_paths(contexts, block_tables, rows, counts, rows_each)

    def share_cache(self, model: DecoderModel) -> "ParallelGpuRunner":
        return ParallelGpuRunner(model, self.num_blocks, self.ranks, shared=self)

    def with_cache(self, model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None) -> "ParallelGpuRunner":
        return ParallelGpuRunner(model, num_blocks, self.ranks, kv_dtype)


class Follower:
    """Computes passes with this rank's share of the model."""

    def __init__(self, model: DecoderModel, group: RankGroup) -> None:
        self._model, self._group, self._workspace = model, group, Workspace(model)
        self._models: dict[int, DecoderModel] = {model.config.num_layers: model}
        self._graphs: dict[DevicePass | DeviceMove, Graph[None]] = {}

    def follow(self, command: Follow, cache: Cache) -> None:
        work, pool = command.work, self._workspace.graph_pool
        if command.launch == "replay":
            self._graphs[work].replay()
        elif command.launch == "capture":
            if work not in self._graphs:
                self._graphs[work] = Graph(self._work(work, cache), self._model.device, pool, is_warm=True)
        else:
            with pool.on_stream():  # captures need the memory that kernels get at their first launch in a stream
                self._work(work, cache)()

    def release(self, cache: int) -> None:
        """Forget the graphs of a cache."""
        self._graphs = {work: graph for work, graph in self._graphs.items() if work.cache != cache}

    def _work(self, work: DevicePass | DeviceMove, cache: Cache) -> Callable[[], None]:
        """Memory that captured work must not allocate is allocated here."""
        if isinstance(work, DeviceMove):
            return partial(self._move, work, CacheAddresses(cache))
        if work.num_layers not in self._models:
            self._models[work.num_layers] = first_layers(self._model, work.num_layers)
        model, workspace = self._models[work.num_layers], self._workspace
        plan = plan_pass(model, work.size, workspace.attention_scratch)
        return partial(
            self._pass, work, model, cache[: work.num_layers], plan, workspace.attention_output(work.size.rows)
        )

    def _pass(
        self, work: DevicePass, model: DecoderModel, cache: Cache, plan: AttentionPlan, attention_out: Tensor
    ) -> None:
        """The layers of a pass; rank 0 computes the logits."""
        inputs = pass_inputs(self._received(work), work)
        where = inputs.tokens, inputs.positions, inputs.layout
        gpu_forward(model, *where, cache, logit_rows=None, plan=plan, attention_out=attention_out)

    def _move(self, work: DeviceMove, addresses: CacheAddresses) -> None:
        inputs = move_inputs(self._received(work), work)
        move_paths(addresses, inputs.contexts, inputs.block_tables, inputs.rows, inputs.counts, work.rows_each)

    def _received(self, work: DevicePass | DeviceMove) -> Tensor:
        """The inputs, as rank 0 sends them."""
        values = torch.zeros(count_values(work), dtype=torch.int64, device=self._model.device)
        return self._group.sum(values)
