"""A cache that another process maps: one memory, which outlives the handle."""

from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
import torch

from paceline.models.parallel import caches as shared_cache
from paceline.models.parallel.caches import CacheShape, SharedCache, receive_cache
from tests.fakes import TINY

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_memory_files", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_both_ends_see_one_memory(dtype: torch.dtype, has_memory_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_memory_files:  # as on a system without memfd_create
        monkeypatch.delattr(shared_cache.os, "memfd_create", raising=False)
    shape = CacheShape.of(TINY, 6, dtype)
    shared = SharedCache(shape, CPU)
    assert sum(values.nbytes for layer in shared.cache for values in layer) == shape.nbytes
    own, other = Pipe()
    assert isinstance(own, Connection)
    assert isinstance(other, Connection)
    with own, other:
        shared.send(other)
        mapped = receive_cache(own.recv(), own, shape)
    assert not any(values.float().any() for layer in mapped for values in layer)
    owned = shared.cache
    for number, (keys, values) in enumerate(mapped):
        keys.view(torch.uint8)[2] = number + 1
        owned[number][1].view(torch.uint8)[3] = number + 7
        assert bool((owned[number][0].view(torch.uint8)[2] == number + 1).all())
        assert bool((values.view(torch.uint8)[3] == number + 7).all())
    shared.close()
    assert bool((mapped[0][0].view(torch.uint8)[2] == 1).all())
