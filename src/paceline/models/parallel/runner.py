"""Loads and runs a tensor-parallel model, from rank 0."""

from collections.abc import Sequence
from functools import cached_property

import torch

from paceline.kernels.cpu.decoder_pass import Sampler
from paceline.models.architectures.decoder import AfterLayer, ForwardOutput
from paceline.models.architectures.llama import DecoderModel
from paceline.models.loading.load import LoadedModel, load_model, open_checkpoint
from paceline.models.parallel.commands import Allocate, Forward, Move, RankSpec, Release
from paceline.models.parallel.ranks import Ranks, all_reduce
from paceline.models.parallel.shards import Shard, check_split
from paceline.models.parallel.shared_cache import CacheShape
from paceline.models.runner import Cache, ModelRunner, Span


def load_parallel(spec: RankSpec) -> tuple[LoadedModel, Ranks]:
    """Rank 0's share of the model, with the config of that share, and the other ranks."""
    config = open_checkpoint(spec.model).config
    check_split(config, spec.size)
    ranks = Ranks.start(spec, config)
    try:
        shard = Shard(0, spec.size, all_reduce)
        loaded = load_model(spec.model, spec.device_of(0), spec.dtype, spec.quantization, spec.activations, shard)
        ranks.join()
    except BaseException:
        ranks.close()
        raise
    return loaded, ranks


class ParallelRunner(ModelRunner):
    """A `ModelRunner` whose passes all ranks compute together. Every rank has the cache of its key-value heads."""

    def __init__(
        self,
        model: DecoderModel,
        num_blocks: int,
        ranks: Ranks,
        kv_dtype: torch.dtype | None = None,
        weights_id: str = "",
        number: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        """`number` and `cache`: those of a runner of the same model whose cache this one shares."""
        self._ranks = ranks
        self._is_owner = number is None
        self._number = ranks.next_cache() if number is None else number
        self._has_moved = False
        if cache is None:
            ranks.send(Allocate(self._number, num_blocks, kv_dtype))
        super().__init__(model, num_blocks, kv_dtype, cache, weights_id)

    def forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
        samplers: Sequence[Sampler] | None = None,
    ) -> ForwardOutput:
        with self._ranks.lock:
            self._ranks.send(Forward(tuple(spans), self.model.config.num_layers, self._number))
            self._has_moved = False  # the sums of this pass wait for what was sent before
            with self._ranks.report_lost_ranks():
                return super().forward(spans, state_layers, last_hidden, after_layer, samplers)

    def share_cache(self, model: DecoderModel) -> ModelRunner:
        cache = self.cache[: model.config.num_layers]
        return ParallelRunner(model, self.num_blocks, self._ranks, number=self._number, cache=cache)

    def with_cache(self, model: DecoderModel, num_blocks: int, kv_dtype: torch.dtype | None) -> "ParallelRunner":
        """A runner with a cache of its own, for this model or its first layers. `close` releases the cache."""
        return ParallelRunner(model, num_blocks, self._ranks, kv_dtype)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self._ranks.send(Move(tuple(sources), tuple(targets), self._number))
            self._has_moved = True
            super().move(sources, targets)

    @property
    def num_head_shares(self) -> int:
        return self._ranks.num_head_shares

    def head_shares(self) -> Sequence[Sequence[Cache]]:
        copies = self._ranks.size // self.num_head_shares
        return [self._caches[i : i + copies] for i in range(0, self._ranks.size, copies)]

    def settle(self) -> None:
        """A pass ends with sums over all ranks, so that no rank uses its cache after it. Only `move` may be late. The first
        call maps the caches, which is impossible during a pass."""
        _ = self._caches
        if self._has_moved:
            self._ranks.settle()
            self._has_moved = False
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Stop the ranks, or release a cache of `with_cache`."""
        if self._number == 0:
            self._ranks.close()
        elif self._is_owner:
            self._ranks.send(Release(self._number))

    @cached_property
    def _caches(self) -> list[Cache]:
        """The caches of all ranks."""
        shape = CacheShape.of(self.model.config, self.num_blocks, self.cache[0][0].dtype)
        return [self.cache, *self._ranks.map_caches(self._number, shape)]
