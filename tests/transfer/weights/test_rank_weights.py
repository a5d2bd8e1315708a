"""Two ranks on the CPU load from a peer with one rank, and a worker with one rank loads from them."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import RankLost
from paceline.core.request import Request, SamplingParams
from paceline.engine.start.build import build_engine
from paceline.kernels.cpu import native
from paceline.model_files.checksums import quick_checksum
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.manifest.manifest import ExportedWeights, weight_form
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.weights import RankExport
from paceline.transfer.weights.loader import WeightsUnavailable
from tests.engine.start.test_build import save_checkpoint
from tests.fakes import run
from tests.transfer.weights.test_loader import CPU, assert_same, load_all, loader, servers

SPEC = RankSpec("no-such-folder/model", 2, CPU, torch.float32)
OPTIONS = {"device": "cpu", "kv_tokens": 1024, "max_num_seqs": 4, "max_batched_tokens": 32}
REQUESTS = [
    Request(
        f"r{i}", tuple((5 * j + i) % 36 for j in range(30)), SamplingParams(seed=i, max_tokens=24, temperature=i / 2)
    )
    for i in range(3)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("weights") / "model", num_hidden_layers=3)


@pytest.fixture(scope="module")
def exported(model: str) -> ExportedWeights:
    return ExportedWeights(load_model(model), weight_form(CPU, torch.float32, None), quick_checksum(model))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    native.set_num_threads(1)


def test_weights_travel_from_one_rank_to_two_and_back(model: str, exported: ExportedWeights) -> None:
    """The model is not on the machine of the two ranks."""
    found: list[tuple[LoadedModel, Ranks]] = []
    with servers(exported) as first, loader(*first) as one:

        def load_ranks(spec: RankSpec) -> tuple[LoadedModel, Ranks]:
            found.append(one.load_ranks(spec))
            return found[0]

        config = EngineConfig(model=SPEC.model, tensor_parallel_size=2, draft=None, **OPTIONS)
        with closing(build_engine(config, load_ranks=load_ranks)) as engine:
            assert (
                run(engine, REQUESTS).tokens == run(build_engine(EngineConfig(model=model, **OPTIONS)), REQUESTS).tokens
            )
            (loaded, ranks) = found[0]
            manifest = exported.manifest
            assert RankExport(loaded, ranks, manifest.form, manifest.fingerprint).manifest == manifest
            with servers(one.wait(loaded)) as second, loader(*second) as other:
                assert_same(load_all(other, SPEC.model), load_model(model))
                assert run(engine, REQUESTS[:1]).tokens  # both ranks still compute


def test_without_peers_and_checkpoint_nothing_is_left(exported: ExportedWeights) -> None:
    with loader() as one, pytest.raises(WeightsUnavailable, match="no peer has it"):
        one.load_ranks(SPEC)
    with servers(exported) as peers, loader(*peers) as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exported, "tensors", lambda part: [torch.ones(1)])  # other bytes than the manifest promises
        with pytest.raises(WeightsUnavailable, match="no peer is left"):
            one.load_ranks(SPEC)


@pytest.mark.slow
def test_a_rank_that_ends_while_it_loads_is_reported(
    exported: ExportedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Ranks.start.__func__  # type: ignore[attr-defined]

    def start_and_end(cls: type[Ranks], *arguments: object, **options: object) -> Ranks:
        ranks: Ranks = start(cls, *arguments, **options)
        ranks._members[0].process.kill()
        ranks._members[0].process.wait()
        return ranks

    monkeypatch.setattr(Ranks, "start", classmethod(start_and_end))
    with servers(exported) as peers, loader(*peers) as one, pytest.raises(RankLost, match="restart the engine"):
        one.load_ranks(SPEC)
