import pytest
import torch

from paceline.worker.handoff import export as staging_pool
from paceline.worker.handoff.export import StagingPool


def test_buffers_are_used_again_by_size() -> None:
    pool = StagingPool(torch.device("cpu"))
    first, other = pool.take(100), pool.take(50)
    first[0] = 7
    pool.give_back(first)
    pool.give_back(other)
    assert pool.num_bytes == 150
    assert pool.take(100) is first
    assert pool.take(100).nbytes == 100
    assert pool.num_bytes == 50


def test_a_full_pool_keeps_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_pool, "MAX_BYTES", 120)
    pool = StagingPool(torch.device("cpu"))
    for buffer in [pool.take(50) for _ in range(3)]:
        pool.give_back(buffer)
    assert pool.num_bytes == 100
