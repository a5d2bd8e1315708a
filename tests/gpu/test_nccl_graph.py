"""A world of one rank, over NCCL: sums inside CUDA graphs, and the steps of an engine. NCCL with several GPUs was never run."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist

from paceline.models.decoder.forward import DecoderModel
from paceline.models.device.cuda_graph import Graph, GraphPool
from paceline.models.loading.load import load_model
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.gpu import ParallelGpuRunner
from paceline.models.parallel.group import RankGroup
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.runner import load_parallel
from paceline.models.runner.gpu.runner import GpuRunner
from tests.engine.harness import GREEDY, SAMPLED, request
from tests.engine.start.test_build import save_checkpoint
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import draft_model, run, tiny_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


def test_a_sum_inside_a_graph() -> None:
    group = RankGroup(RankSpec("model", 1, DEVICE, torch.float32), 0)
    group.join(dist.HashStore())
    try:
        values = torch.arange(8.0, device=DEVICE)
        assert torch.equal(group.sum(values.clone()), values)  # connects
        graph = Graph(lambda: group.sum(values * 2), DEVICE, GraphPool(DEVICE))
        values += 1
        assert graph.replay().tolist() == [2.0 * i + 2.0 for i in range(8)]
    finally:
        group.leave()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def world(target: str) -> Iterator[tuple[DecoderModel, Ranks]]:
    loaded, ranks = load_parallel(RankSpec(target, 1, DEVICE, torch.float32))
    yield loaded.model, ranks
    ranks.close()


def test_drafts_in_graphs(target: str, world: tuple[DecoderModel, Ranks]) -> None:
    model, ranks = world
    draft = load_model(target, DEVICE, torch.float32, None).model
    kind = partial(ParallelGpuRunner, ranks=ranks)
    engine = tiny_engine(model, draft_model(draft, runner=GpuRunner), 3, runner_kind=kind, graph_depth=3)
    asked = [request("greedy", range(20), **GREEDY), request("seeded", range(3, 9), **SAMPLED)]
    result = run(engine, asked)
    whole = load_model(target, DEVICE, torch.float32, None).model
    check_contract(differences(whole, asked, plain_text(whole, asked), result.tokens), is_bitwise=False)
    assert result.accepted > 0
    assert engine.graph is not None
    assert engine.graph.num_steps > 3
