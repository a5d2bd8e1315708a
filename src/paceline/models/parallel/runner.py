"""Loads and runs a tensor-parallel model, from rank 0."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.architectures.decoder import AfterLayer, ForwardOutput
from paceline.models.architectures.llama import DecoderModel
from paceline.models.loading.load import LoadedModel, load_model, open_checkpoint
from paceline.models.parallel.ranks import Allocate, Forward, Move, Ranks, RankSpec, all_reduce
from paceline.models.parallel.shards import Shard, check_split
from paceline.models.runner import ModelRunner, Span


def load_parallel(spec: RankSpec) -> tuple[LoadedModel, Ranks]:
    """Rank 0's share of the model, with the config of that share, and the other ranks."""
    check_split(open_checkpoint(spec.model).config, spec.size)
    ranks = Ranks.start(spec)
    try:
        shard = Shard(0, spec.size, all_reduce)
        loaded = load_model(spec.model, spec.device_of(0), spec.dtype, spec.quantization, spec.activations, shard)
        ranks.join()
    except BaseException:
        ranks.close()
        raise
    return loaded, ranks


class ParallelRunner(ModelRunner):
    """A `ModelRunner` whose passes all ranks compute together."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        ranks: Ranks,
        kv_dtype: torch.dtype | None = None,
        cache: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self._ranks = ranks
        if cache is None:
            ranks.send(Allocate(num_blocks, kv_dtype))
        super().__init__(model, num_blocks, kv_dtype, cache)

    def forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
    ) -> ForwardOutput:
        self._ranks.send(Forward(tuple(spans), self.model.config.num_layers))
        with self._ranks.report_lost_ranks():
            return super().forward(spans, state_layers, last_hidden, after_layer)

    def share_cache(self, model: DecoderModel) -> ModelRunner:
        cache = self.cache[: model.config.num_layers]
        return ParallelRunner(model, self.num_blocks, self._ranks, cache=cache)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self._ranks.send(Move(tuple(sources), tuple(targets)))
            super().move(sources, targets)

    def close(self) -> None:
        self._ranks.close()
