"""Caches of ranks on a GPU: another process maps one by CUDA IPC, and blocks of two shares have the bytes of one."""

import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from paceline.core.sequence import BLOCK_SIZE
from paceline.models.blocks import kv_blocks
from paceline.models.blocks.host_blocks import HostBlocks
from paceline.models.parallel.caches import CacheShape, receive_cache
from paceline.models.runner.runner import Cache, ModelRunner
from tests.fakes import TINY, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = CacheShape(TINY.num_layers, 32, TINY.num_kv_heads // 2, TINY.head_dim, torch.bfloat16)
OWNER = """
import sys
import torch
from multiprocessing.connection import Connection
from tests.gpu.test_rank_caches import SHAPE
from paceline.models.parallel.caches import SharedCache
connection = Connection(int(sys.argv[1]))
shared = SharedCache(SHAPE, torch.device("cuda"))
for number, (keys, values) in enumerate(shared.cache):
    keys.fill_(number + 1)
torch.cuda.synchronize()
shared.send(connection)
connection.recv()
connection.send([float(values[5].float().mean()) for _, values in shared.cache])
connection.recv()
"""


def test_another_process_reads_and_writes_the_cache_of_a_rank() -> None:
    own, other = multiprocessing.Pipe()
    assert isinstance(other, Connection)
    command = [sys.executable, "-c", OWNER, str(other.fileno())]
    with subprocess.Popen(command, pass_fds=[other.fileno()]) as process:
        other.close()
        cache = receive_cache(own.recv(), own, SHAPE)
        for number, (keys, values) in enumerate(cache):
            assert float(keys.float().mean()) == number + 1
            assert not values.any()
            values[5] = number + 2
        torch.cuda.synchronize()
        own.send("written")
        assert own.recv() == [number + 2 for number in range(TINY.num_layers)]
        del cache, keys, values
        own.send("done")
        assert process.wait(60) == 0


class TwoShares(ModelRunner):
    """Two ranks whose caches are both in this process."""

    num_head_shares = 2

    def __init__(self) -> None:
        super().__init__(tiny_model(device="cuda"), 32, torch.bfloat16)
        shape = (32, BLOCK_SIZE, TINY.num_kv_heads // 2, TINY.head_dim)
        self.ranks: list[Cache] = [
            [
                (torch.randn(shape, device="cuda").bfloat16(), torch.randn(shape, device="cuda").bfloat16())
                for _ in self.cache
            ]
            for _ in range(2)
        ]
        self.cache = self.ranks[0]

    def head_shares(self) -> list[list[Cache]]:
        return [[cache] for cache in self.ranks]


def test_blocks_of_two_shares_have_the_bytes_of_one() -> None:
    split, whole = TwoShares(), ModelRunner(tiny_model(device="cuda"), 32, torch.bfloat16)
    data = bytearray(3 * kv_blocks.block_bytes(split))
    kv_blocks.read_blocks(split, [3, 5, 9], data)
    kv_blocks.write_blocks(whole, [1, 2, 3], bytes(data))
    for (keys, values), *shares in zip(whole.cache, *split.ranks, strict=True):
        assert torch.equal(keys[[1, 2, 3]], torch.cat([one[0][[3, 5, 9]] for one in shares], 2))
        assert torch.equal(values[[1, 2, 3]], torch.cat([one[1][[3, 5, 9]] for one in shares], 2))
    memory = HostBlocks(split, 20)
    memory.save([3, 5, 9], [7, 0, 2])
    memory.wait(7)
    assert bytes(memory.view(7)) == data[: memory.block_bytes]
    memory.load([7, 0, 2], [20, 21, 22])
    again = bytearray(len(data))
    kv_blocks.read_blocks(split, [20, 21, 22], again)
    assert again == data
