"""GPU memory of another process, read in place: tensors, KV blocks and weights, with two processes on one GPU."""

from pathlib import Path

import pytest
import torch

from paceline.models.loading.load import load_model
from paceline.targets.pool import TargetPool
from paceline.transfer.transfer import ChannelUnavailable
from paceline.transfer.weights.loader import WeightLoader
from paceline.wire.transfer_messages import MemoryRegion
from paceline.wire.worker_spec import Member, PeerAddress
from tests.engine.harness import request, tokens_of
from tests.engine.start.test_build import save_checkpoint
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import tiny_model
from tests.gpu.in_place_source import DTYPE, source, tiny
from tests.processes.target_harness import Members, StreamReader, cluster, until
from tests.transfer.weights.test_loader import assert_same
from tests.worker.handoff.test_handoffs import LONG, Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


def test_a_tensor_of_another_process_is_mapped_and_unmapped() -> None:
    from paceline.transfer import memory as cuda_memory

    memory = cuda_memory.CudaMemory(DEVICE)
    with source("tensor", "cuda") as other:
        region = other.region
        found = memory.open(region).view(torch.int32)
        assert torch.equal(found, torch.arange(1 << 20, dtype=torch.int32, device=DEVICE))
        again = memory.open(region)  # the same mapping, counted
        assert again.data_ptr() == found.data_ptr()
        other.ask()
        assert int(found.sum()) == sum(range(1 << 20)) + (1 << 20)  # the memory itself, no copy
        part = memory.open(MemoryRegion(region.process, region.handle, region.offset + 8, 16)).view(torch.int32)
        assert part.tolist() == [3, 4, 5, 6]
        del found, again, part
        assert not cuda_memory._mapped
        assert memory.open(region).view(torch.int32)[:2].tolist() == [1, 2]


def test_memory_of_this_process_and_of_no_process_cannot_be_mapped() -> None:
    from paceline.transfer import memory as cuda_memory

    memory = cuda_memory.CudaMemory(DEVICE)
    own = memory.share(torch.zeros(16, device=DEVICE))
    with pytest.raises(ChannelUnavailable, match="this process"):
        memory.open(own)
    with pytest.raises(ChannelUnavailable, match="cuIpcOpenMemHandle"):
        memory.open(MemoryRegion(bytes(16), bytes(64), 0, 16))
    with pytest.raises(ChannelUnavailable, match="contiguous"):
        memory.share(torch.zeros(4, 4, device=DEVICE).T)


def test_the_device_works_after_the_other_process_was_killed() -> None:
    from paceline.transfer import memory as cuda_memory

    memory = cuda_memory.CudaMemory(DEVICE)
    with source("tensor", "cuda") as other:
        found = memory.open(other.region)
        copy = found.clone()
        torch.cuda.synchronize()
        other.process.kill()
        other.process.wait(30)
        del found
        assert int(copy.view(torch.int32)[7]) == 7
        assert int(torch.ones(8, device=DEVICE).sum()) == 8
        torch.cuda.synchronize()


def test_blocks_of_another_process_are_read_in_place() -> None:
    submitted = [request(f"r{i}", LONG[i:], temperature=float(i % 2), max_tokens=24, ignore_eos=True) for i in range(6)]
    target = Target("t", tiny("cuda"))
    try:
        with source("prefill", "cuda") as other:
            members = Members(target)
            members.known.append(Member("p", "prefill", "prefill", other.first["address"]))
            pool = TargetPool(cluster(), members)
            try:
                until(lambda: sum(line.is_usable for line in pool.targets().values()) == 2)
                until(lambda: len(target.handoffs._connections.loads) == 1)
                outputs = StreamReader(pool, *submitted).read_all()
                counts = target.handoffs.counts()
                assert (counts.failed, counts.done > 0) == (0, True)
                assert counts.in_place_bytes == counts.bytes > 0
                until(lambda: other.ask()["done"] == counts.done)
                until(lambda: other.ask()["held"] == 0)
            finally:
                pool.close()
    finally:
        target.stop()
    model = tiny_model(device="cuda")
    tokens = {(one.id, 0): tokens_of(outputs, one.id) for one in submitted}
    check_contract(differences(model, submitted, plain_text(model, submitted), tokens), is_bitwise=False)


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_of_another_process_have_the_same_bits(tmp_path: Path, in_place: bool) -> None:
    model = save_checkpoint(tmp_path / "model", num_hidden_layers=6)
    with source("weights", "cuda", model) as other:
        peers = [PeerAddress("peer", other.first["address"])]
        loader = WeightLoader(peers, None, None if in_place else ("socket",))
        try:
            found = loader.load("/nowhere/model", DEVICE, DTYPE, None)
            loader.wait(found)
        finally:
            loader.close()
        assert_same(found, load_model(model, DEVICE, DTYPE, None))
        sent = other.ask()
        assert sent["bytes"] > found.model.weight_bytes
        assert (sent["in_place"] > found.model.weight_bytes) == in_place


def test_a_peer_that_is_killed_leaves_the_rest_to_the_disk(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", num_hidden_layers=6)
    with source("weights", "cuda", model) as other:
        loader = WeightLoader([PeerAddress("peer", other.first["address"])], None)
        try:
            found = loader.load(model, DEVICE, DTYPE, None)
            other.process.kill()
            loader.wait(found)
        finally:
            loader.close()
        assert_same(found, load_model(model, DEVICE, DTYPE, None))
