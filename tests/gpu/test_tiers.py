"""Tiers of a GPU cache: asynchronous copies, and the same text."""

from pathlib import Path

import pytest
import torch

from paceline.models.blocks import kv_blocks
from paceline.models.blocks.host_blocks import HostBlocks
from paceline.models.runners import make_runner
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import mixed_requests, plain_text
from tests.fakes import TINY, run, tiny_engine, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_saved_blocks_are_loaded_unchanged(dtype):
    runner = make_runner(tiny_model(device="cuda"), 64, dtype)
    for plane in kv_blocks.planes(runner):
        plane.copy_(torch.randint(0, 120, plane.shape, dtype=torch.uint8, device="cuda"))
    before = [plane.clone() for plane in kv_blocks.planes(runner)]
    memory = HostBlocks(runner, 40)
    data = bytearray(2 * memory.block_bytes)
    kv_blocks.read_blocks(runner, [3, 5], data)
    memory.save(list(range(30)), list(range(5, 35)))
    memory.wait(8)
    assert bytes(memory.view(8)) == data[: memory.block_bytes]
    for plane in kv_blocks.planes(runner):
        plane[:30] = 0  # after the copies, in stream order
    memory.load(list(range(5, 35)), list(range(30)))
    kv_blocks.write_blocks(runner, [60, 61], bytes(data))
    for plane, old in zip(kv_blocks.planes(runner), before, strict=True):
        assert torch.equal(plane[:60], old[:60])
        assert torch.equal(plane[60], old[3])
        assert torch.equal(plane[61], old[5])


def test_the_text_is_the_same_with_tiers(tmp_path: Path):
    from paceline.core.clock import WallClock
    from paceline.engine.tiers import Tiers
    from paceline.kv.tiers.store import TierStore
    from paceline.kv.tiers.tiers import DiskFolder

    model = tiny_model(device="cuda")
    requests = mixed_requests(12, TINY.vocab_size, max_tokens=40)
    expected = plain_text(model, requests)
    for _ in range(2):  # the second run is after a restart

        def make(runner, tables, clock):
            memory = HostBlocks(runner, 64)
            folder = DiskFolder(tmp_path, bytes(32), memory.block_bytes)
            return Tiers(tables, memory, TierStore(memory, WallClock(), folder, 1 << 30), WallClock())

        engine = tiny_engine(model, None, kv_tokens=320, max_batched_tokens=64, tiers=make)
        tiers = engine.scheduler.tiers
        for _ in range(2):
            result = run(engine, requests)
            check_contract(differences(model, requests, expected, result.tokens), is_bitwise=False)
        assert tiers.report().host_hits + tiers.report().disk_hits > 0
        engine.close()
