"""What the runners of a tensor-parallel model on CPUs and on GPUs have in common: the caches of the other ranks."""

from collections.abc import Sequence

from paceline.models.parallel.rank_cache import RankCache
from paceline.models.parallel.ranks import Ranks
from paceline.models.runner import Cache, ModelRunner


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
