"""Loads and runs a tensor-parallel model, from rank 0.

`ParallelRunner` runs it on CPUs. `RankCache` is a KV cache of such a model: every rank has the part of its key-value heads.
`RankCacheOwner` is what the runners on CPUs and on GPUs have in common: the caches of the other ranks.
"""

from collections.abc import Sequence

import torch

from paceline.kernels.cpu.decoder import Sampler
from paceline.kernels.formats.layout import AfterLayer
from paceline.models.decoder import DecoderModel, ForwardOutput
from paceline.models.loading import LoadedModel, load_model, open_checkpoint
from paceline.models.parallel.caches import CacheShape
from paceline.models.parallel.commands import (
    Allocate,
    DeviceMove,
    DevicePass,
    Follow,
    Forward,
    LaunchKind,
    Move,
    RankSpec,
    Release,
)
from paceline.models.parallel.ranks import Ranks
from paceline.models.runner import Cache, ModelRunner, Span
from paceline.models.shards import Shard, check_split


class RankCache:
    def __init__(self, ranks: Ranks, num_blocks: int, kv_dtype: torch.dtype | None) -> None:
        """Let the other ranks allocate their parts."""
        self.ranks, self.number = ranks, ranks.next_cache()
        self._has_moved = False
        self._mapped: list[Cache] | None = None
        ranks.send(Allocate(self.number, num_blocks, kv_dtype))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values between slots on the other ranks."""
        self.ranks.send(Move(tuple(sources), tuple(targets), self.number))
        self._has_moved = True

    def pass_began(self) -> None:
        """The other ranks compute a pass. Its sums wait for what was sent before."""
        self._has_moved = False

    def follow(self, launch: LaunchKind, work: DevicePass | DeviceMove) -> None:
        """Let the other ranks do this work as rank 0 does."""
        self.ranks.send(Follow(launch, work))
        if launch != "capture":  # which only records the work
            self._has_moved = isinstance(work, DeviceMove)

    def settle(self, own: Cache) -> None:
        """Wait until the other ranks no longer use their parts. A pass ends with sums over all ranks, so that no rank uses its
        part after it. Only moves may be late. The first call maps the parts, which is impossible during a pass. `own` is the
        part of rank 0."""
        self._parts(own)
        if self._has_moved:
            self.ranks.settle()
            self._has_moved = False
        if own[0][0].is_cuda:
            torch.cuda.current_stream(own[0][0].device).synchronize()

    def head_shares(self, own: Cache) -> Sequence[Sequence[Cache]]:
        """The parts of all ranks: for every share of the key-value heads, in their order, the part of each rank with it."""
        parts, copies = self._parts(own), self.ranks.size // self.ranks.num_head_shares
        return [parts[i : i + copies] for i in range(0, self.ranks.size, copies)]

    def close(self) -> None:
        """Release the parts of the other ranks; with the first cache, stop these ranks."""
        if self.number == 0:
            self.ranks.close()
        else:
            self.ranks.send(Release(self.number))

    def _parts(self, own: Cache) -> list[Cache]:
        if self._mapped is None:
            num_blocks, _, num_heads, width = own[0][0].shape
            shape = CacheShape(len(own), num_blocks, num_heads, width, own[0][0].dtype)
            self._mapped = [own, *self.ranks.map_caches(self.number, shape)]
        return self._mapped


class RankCacheOwner(ModelRunner):
    """Base class of a runner whose cache is divided among ranks. Name it before the runner that computes rank 0's part."""

    ranks: Ranks
    _rank_cache: RankCache
    _is_owner: bool
    """Whether `close` releases the cache: it is not that of another runner."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            self._rank_cache.move(sources, targets)
            super().move(sources, targets)

    @property
    def num_head_shares(self) -> int:
        return self.ranks.num_head_shares

    def head_shares(self) -> Sequence[Sequence[Cache]]:
        return self._rank_cache.head_shares(self.cache)

    def settle(self) -> None:
        self._rank_cache.settle(self.cache)

    def close(self) -> None:
        """Stop the ranks, or release a cache of `with_cache`."""
        if self._is_owner:
            self._rank_cache.close()


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
