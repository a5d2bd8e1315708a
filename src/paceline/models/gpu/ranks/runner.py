"""Runs a tensor-parallel model on GPUs, from rank 0."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.layout import PassSize
from paceline.models.architectures.decoder import AfterLayer, ForwardOutput
from paceline.models.architectures.llama import DecoderModel
from paceline.models.gpu.ranks.device_inputs import MoveInputs
from paceline.models.gpu.ranks.leader import Leader
from paceline.models.gpu.runner import GpuRunner
from paceline.models.parallel.cache_owner import RankCacheOwner
from paceline.models.parallel.rank_cache import RankCache
from paceline.models.parallel.ranks import Ranks
from paceline.models.runner import Span, build_inputs


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
        size = PassSize(len(inputs.tokens), len(spans), len(inputs.tokens))
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
