"""A world of one rank sums with NCCL inside a CUDA graph. NCCL with several GPUs was never run."""

import pytest
import torch
import torch.distributed as dist

from paceline.models.cuda_graph import Graph, GraphPool
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.ranks import all_reduce, join_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


def test_a_sum_inside_a_graph() -> None:
    join_group(RankSpec("model", 1, torch.device("cuda", 0), torch.float32), 0, dist.HashStore())
    try:
        values = torch.arange(8.0, device=DEVICE)
        assert torch.equal(all_reduce(values.clone()), values)  # connects
        graph = Graph(lambda: all_reduce(values * 2), DEVICE, GraphPool(DEVICE))
        values += 1
        assert graph.replay().tolist() == [2.0 * i + 2.0 for i in range(8)]
    finally:
        dist.destroy_process_group()
