"""Graph steps of a model that two ranks compute, interpreted: the text of one rank. tests/gpu has the same on a GPU."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.engine.graph import batch as device_batch
from paceline.kernels.cpu import native
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import load_model
from paceline.models.parallel import ranks as ranks_module
from paceline.models.parallel.commands import Command, DeviceMove, DevicePass, Follow, RankSpec
from paceline.models.parallel.gpu import ParallelGpuRunner
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.runner import load_parallel
from paceline.models.runner.runner import Span
from tests.engine.graph.oracle import OracleProposer
from tests.engine.start.test_build import save_checkpoint
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import Result, draft_model, request, run, tiny_engine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
CPU = torch.device("cpu")
SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
         "num_key_value_heads": 2}  # fmt: skip
SAMPLINGS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.9, "top_p": 0.8, "seed": 2})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target", **SHAPE)


@pytest.fixture(scope="module")
def split(target: str) -> Iterator[tuple[DecoderModel, Ranks]]:
    """Rank 0's share of the model, and the other rank. Tests leave their runners open: the first would stop the other rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        patch.setattr(ranks_module, "RANK_PROCESS", "tests.engine.graph.interpreted_rank")
        loaded, ranks = load_parallel(RankSpec(target, 2, CPU, torch.float32))
    yield loaded.model, ranks
    ranks.close()
    native.set_num_threads(1)
    assert not dist.is_initialized()


@pytest.fixture
def model(target: str) -> DecoderModel:
    return load_model(target, CPU, torch.float32, None).model


class Sent:
    """What rank 0 sends."""

    def __init__(self, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
        self.works: list[DevicePass | DeviceMove] = []
        send = ranks.send

        def record(command: Command) -> None:
            if isinstance(command, Follow):
                self.works.append(command.work)
            send(command)

        monkeypatch.setattr(ranks, "send", record)


def requests(samplings: Sequence[dict[str, float]], max_tokens: int) -> list[Request]:
    lengths = (14, 3, 6)  # one of them grows into its second block
    return [
        request(f"r{i}", [(7 * i + 3 * j) % 30 for j in range(lengths[i])], max_tokens=max_tokens, **sampling)
        for i, sampling in enumerate(samplings)
    ]


def check(engine: Engine, model: DecoderModel, asked: list[Request]) -> Result:
    result = run(engine, asked)
    check_contract(differences(model, asked, plain_text(model, asked), result.tokens), is_bitwise=False)
    assert engine.graph is not None
    assert engine.graph.num_steps > 0
    return result


def test_drafts_of_a_model(split: tuple[DecoderModel, Ranks], model: DecoderModel, tmp_path: Path) -> None:
    """Prompts beside sequences that decode, padded passes and passes of the host: every rank follows all of them."""
    share, ranks = split
    assert share.config.num_heads == model.config.num_heads // 2
    draft = load_model(save_checkpoint(tmp_path / "draft", perturb=0.2, **SHAPE), CPU, torch.float32, None).model
    from paceline.models.runner.gpu.runner import GpuRunner

    proposer = draft_model(draft, runner=GpuRunner)
    engine = tiny_engine(share, proposer, 3, runner_kind=partial(ParallelGpuRunner, ranks=ranks), graph_depth=3)
    result = check(engine, model, requests(SAMPLINGS, 7))
    assert 0 < result.accepted < result.drafted


def test_trees_whose_paths_move_in_the_cache_of_every_rank(
    split: tuple[DecoderModel, Ranks], model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, ranks = split
    asked = requests(SAMPLINGS[:2], 12)
    proposer = OracleProposer(plain_text(model, asked))
    monkeypatch.setattr(device_batch, "make_drafter", proposer.drafter)
    sent = Sent(ranks, monkeypatch)
    engine = tiny_engine(share, proposer, 7, runner_kind=partial(ParallelGpuRunner, ranks=ranks), graph_depth=7)
    assert check(engine, model, asked).accepted > 3
    assert {type(work) for work in sent.works} == {DevicePass, DeviceMove}
    assert any(work.size.is_tree for work in sent.works if isinstance(work, DevicePass))


def test_a_runner_settles_after_a_path_has_moved(
    split: tuple[DecoderModel, Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass ends with sums over all ranks. After a path, only the other ranks know that they have moved it."""
    share, ranks = split
    runner = ParallelGpuRunner(share, 4, ranks)
    (mapped,) = runner.head_shares()[1]
    runner.forward([Span([2], 0, [3, 1, 4, 1], 1)])
    settled = []
    settle = ranks.settle
    monkeypatch.setattr(ranks, "settle", lambda: settled.append(settle()))
    runner.settle()
    assert not settled
    contexts, tables, count = (torch.tensor(values, dtype=torch.int32) for values in ([1], [[2]], [1]))
    runner.move_paths(contexts, tables, torch.tensor([[0, 2]]), count, 3)  # slot 3 to slot 2
    runner.settle()
    assert len(settled) == 1
    for keys, values in mapped:
        assert torch.equal(keys[2, 2], keys[2, 3])
        assert torch.equal(values[2, 2], values[2, 3])


def test_caches_and_early_exits_are_apart(split: tuple[DecoderModel, Ranks], model: DecoderModel) -> None:
    """A second cache holds other keys, and the first layers alone compute what they do in the whole model."""
    from paceline.models.runner.gpu.runner import GpuRunner
    from paceline.models.runner.runner import early_exit

    share, ranks = split
    two, one = ParallelGpuRunner(share, 4, ranks), GpuRunner(model, 4)
    second = two.with_cache(share, 4, None)
    first, again = Span([2], 0, [3, 1, 4], 1), Span([2], 3, [5], 1)
    other = Span([2], 0, [9, 9, 9], 1)
    for runner in (two, one):
        runner.forward([first])
    second.forward([other])
    torch.testing.assert_close(two.forward([again]).logits, one.forward([again]).logits, rtol=1e-4, atol=1e-5)
    exits = [early_exit(runner, 1).forward([again]).logits for runner in (two, one)]
    torch.testing.assert_close(*exits, rtol=1e-4, atol=1e-5)
    second.close()
    (mapped,) = two.head_shares()[1]
    assert mapped[0][0].shape == two.cache[0][0].shape
    assert bool(mapped[0][0][2, :4].any())
    two.move([2 * 16], [3 * 16])
    two.settle()
    assert torch.equal(mapped[0][0][3, 0], mapped[0][0][2, 0])
