"""A KV cache of a tensor-parallel model, from rank 0. Every rank has the part of its key-value heads."""

from collections.abc import Sequence

import torch

from paceline.models.parallel.commands import (
    Allocate,
    DeviceMove,
    DevicePass,
    Follow,
    LaunchKind,
    Move,
    Release,
)
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.shared_cache import CacheShape
from paceline.models.runner import Cache


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
