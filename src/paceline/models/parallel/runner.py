"""Loads and runs a tensor-parallel model, from rank 0."""

from collections.abc import Sequence

import torch

from paceline.kernels.cpu.decoder_pass import Sampler
from paceline.models.architectures.decoder import AfterLayer, ForwardOutput
from paceline.models.architectures.llama import DecoderModel
from paceline.models.loading.load import LoadedModel, load_model, open_checkpoint
from paceline.models.parallel.cache_owner import RankCacheOwner
from paceline.models.parallel.commands import Forward, RankSpec
from paceline.models.parallel.rank_cache import RankCache
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.shards import Shard, check_split
from paceline.models.runner import ModelRunner, Span


def load_parallel(spec: RankSpec) -> tuple[LoadedModel, Ranks]:
    """Rank 0's share of the model, with the config of that share, and the other ranks."""
    config = open_checkpoint(spec.model).config
    check_split(config, spec.size)
    ranks = Ranks.start(spec, config)
    try:
        shard = Shard(0, spec.size, ranks.group.sum)
        loaded = load_model(spec.model, spec.device_of(0), spec.dtype, spec.quantization, spec.activations, shard)
        ranks.join()
    except BaseException:
        ranks.close()
        raise
    return loaded, ranks


class ParallelRunner(RankCacheOwner):
    """A `ModelRunner` whose passes all ranks compute together, on CPUs."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        ranks: Ranks,
        kv_dtype: torch.dtype | None = None,
        weights_id: str = "",
        shared: "ParallelRunner | None" = None,
    ) -> None:
        """`shared` is a runner of the same model, whose cache this runner shares."""
        self.ranks, self._is_owner = ranks, shared is None
        self._rank_cache = RankCache(ranks, num_blocks, kv_dtype) if shared is None else shared._rank_cache
        cache = None if shared is None else shared.cache[: model.config.num_layers]
        super().__init__(model, num_blocks, kv_dtype, cache, weights_id)

    def forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
        samplers: Sequence[Sampler] | None = None,
    ) -> ForwardOutput:
        with self.ranks.lock:
            self.ranks.send(Forward(tuple(spans), self.model.config.num_layers, self._rank_cache.number))
            self._rank_cache.pass_began()
            with self.ranks.report_lost_ranks():
                return super().forward(spans, state_layers, last_hidden, after_layer, samplers)

    def share_cache(self, model: DecoderModel) -> ModelRunner:
        return ParallelRunner(model, self.num_blocks, self.ranks, shared=self)

    def with_cache(self, model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None) -> ModelRunner:
        return ParallelRunner(model, num_blocks, self.ranks, kv_dtype)
