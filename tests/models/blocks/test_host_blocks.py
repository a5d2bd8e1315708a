"""Blocks in host memory: saved, loaded, and viewed as bytes. The code for GPUs is tested on the CPU too."""

from typing import Any

import pytest
import torch

from paceline.models.blocks import host_blocks, kv_blocks
from paceline.models.blocks.host_blocks import HostBlocks
from paceline.models.device.cuda_graph import StreamEvent
from paceline.models.runner.runner import ModelRunner
from tests.fakes import tiny_model

MODEL = tiny_model()


class CountingEvent(StreamEvent):
    waits = 0

    def wait(self) -> None:
        CountingEvent.waits += 1


@pytest.fixture(params=["cpu", "gpu code on cpu"])
def memory(request: Any, monkeypatch: pytest.MonkeyPatch) -> HostBlocks:
    runner = ModelRunner(MODEL, 16)
    generator = torch.Generator().manual_seed(3)
    for plane in kv_blocks.planes(runner):
        plane.copy_(torch.randint(0, 255, plane.shape, dtype=torch.uint8, generator=generator))
    made = HostBlocks(runner, 12)
    if request.param != "cpu":
        made._is_cuda = True
        monkeypatch.setattr(host_blocks, "StreamEvent", CountingEvent)
        monkeypatch.setattr(kv_blocks, "CHUNK_BYTES", 3 * made.block_bytes)  # several chunks
    made.runner = runner  # type: ignore[attr-defined]
    return made


def test_saved_blocks_can_be_loaded_to_other_blocks(memory: HostBlocks) -> None:
    runner: ModelRunner = memory.runner  # type: ignore[attr-defined]
    before = [plane.clone() for plane in kv_blocks.planes(runner)]
    blocks, slots = [3, 9, 0, 14, 7, 8, 1], [11, 2, 5, 0, 7, 1, 3]
    memory.save(blocks, slots)
    for plane in kv_blocks.planes(runner):
        plane[blocks] = 0
    targets = [4, 2, 6, 5, 10, 11, 12]
    memory.load(slots, targets)
    for plane, old in zip(kv_blocks.planes(runner), before, strict=True):
        assert torch.equal(plane[targets], old[blocks])
        assert torch.equal(plane[[13, 15]], old[[13, 15]])
        assert not plane[blocks].any()


def test_a_slot_has_the_bytes_of_its_block(memory: HostBlocks) -> None:
    runner: ModelRunner = memory.runner  # type: ignore[attr-defined]
    data = bytearray(memory.block_bytes)
    kv_blocks.read_blocks(runner, [5], data)
    memory.save([5], [8])
    memory.wait(8)
    memory.wait(0)  # no copy was made there
    assert bytes(memory.view(8)) == data
    memory.view(9)[:] = data
    memory.load([9], [2])
    for plane in kv_blocks.planes(runner):
        assert torch.equal(plane[2], plane[5])


def test_wait_blocks_for_pending_copies_only(memory: HostBlocks) -> None:
    CountingEvent.waits = 0
    memory.save([1, 2], [3, 4])
    memory.wait(3)
    memory.wait(5)
    assert CountingEvent.waits == memory._is_cuda
