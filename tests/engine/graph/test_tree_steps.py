"""Rounds whose drafts are trees, all on the device: the same text as plain decoding one step at a time."""

import pytest
import torch

from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.engine.graph import batch as device_batch
from paceline.engine.graph.batch import GraphBatch
from paceline.models.device.cuda_graph import Graph
from paceline.models.runner.gpu.runner import GpuRunner
from tests.engine.graph.oracle import OracleProposer
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import TINY, MixedDepth, Result, request, run, tiny_engine, tiny_model
from tests.heads import eagle
from tests.specs import changed
from tests.speculation.proposers.eagle.test_beams import NoWaits

SMALL = changed(TINY, num_layers=1)  # interpreted kernels take milliseconds each
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 5, "seed": 2},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 3},
)


def requests(samplings, max_tokens: int = 8) -> list[Request]:
    return [
        request(
            f"r{i}", [(7 * i + 3 * j) % TINY.vocab_size for j in range(3 + 6 * i)], max_tokens=max_tokens, **sampling
        )
        for i, sampling in enumerate(samplings)
    ]


def check(engine: Engine, asked: list[Request], plain, **options) -> Result:
    result = run(engine, asked, **options)
    model = tiny_model(config=SMALL, device=DEVICE)
    check_contract(differences(model, asked, plain, result.tokens), is_bitwise=False)
    assert engine.graph.num_steps > 0
    return result


class TestTreesThatHideTheTruth:
    """Accepted paths are long and scattered over the tree."""

    def run(self, monkeypatch, asked: list[Request], depth, **options) -> Result:
        model = tiny_model(config=SMALL, device=DEVICE)
        plain = plain_text(model, asked)
        proposer = OracleProposer(plain)
        monkeypatch.setattr(device_batch, "make_drafter", proposer.drafter)
        arrivals = options.pop("arrivals", None)
        engine = tiny_engine(model, proposer, depth, runner_kind=GpuRunner, graph_depth=7, **options)
        return check(engine, asked, plain, arrivals=arrivals)

    @pytest.mark.parametrize("sampling", range(len(SAMPLINGS)))
    def test_one_sequence(self, monkeypatch, sampling):
        result = self.run(monkeypatch, requests(SAMPLINGS[sampling:][:1], max_tokens=14), 7)
        assert result.accepted > 2

    @pytest.mark.usefixtures("captures_with_a_run")
    def test_all_together(self, monkeypatch):
        result = self.run(monkeypatch, requests(SAMPLINGS, max_tokens=9), 7)
        assert result.accepted > 5

    def test_depths_that_change_and_requests_that_arrive_late(self, monkeypatch):
        asked = requests(SAMPLINGS[:3], max_tokens=9)
        result = self.run(monkeypatch, asked, MixedDepth(7), max_num_seqs=2, arrivals=2)
        assert result.accepted > 0


class TestEagle:
    """That its trees are the host's, test_tree_drafter.py shows."""

    def run(self, asked: list[Request], depth, **options) -> Result:
        model = tiny_model(config=SMALL, device=DEVICE)
        proposer = eagle(model)
        arrivals = options.pop("arrivals", None)
        engine = tiny_engine(model, proposer, depth, runner_kind=GpuRunner, graph_depth=7, **options)
        result = check(engine, asked, plain_text(model, asked), arrivals=arrivals)
        assert proposer.num_free_blocks == 64
        return result

    @pytest.mark.usefixtures("captures_with_a_run")
    def test_warm_up_leaves_no_state(self):
        model = tiny_model(config=SMALL, device=DEVICE)
        proposer = eagle(model)
        few = {"max_num_seqs": 1, "max_batched_tokens": 8, "max_model_len": 32}
        engine = tiny_engine(model, proposer, 7, runner_kind=GpuRunner, graph_depth=7, **few)
        head, cache = proposer.runner, [tensor for layer in engine.runner.cache for tensor in layer]
        now = [
            *(part[: engine.runner.num_blocks] for part in cache),
            *(part[: head.num_blocks] for part in head.cache[0]),
        ]
        before = [tensor.clone() for tensor in now]
        assert set(engine.graph.draft_seconds(1)) == {1, 3, 7}
        engine.warm_up()
        engine.hooks.finish_idle_work()
        assert all(map(torch.equal, before, now))
        check(engine, asked := requests(SAMPLINGS[:1], max_tokens=5), plain_text(model, asked))

    @pytest.mark.parametrize("is_on", [True, pytest.param(False, marks=pytest.mark.slow)])
    def test_after_warm_up_no_step_is_captured(self, monkeypatch, is_on):
        model = tiny_model(config=SMALL, device=DEVICE)
        proposer = eagle(model)
        few = {"max_num_seqs": 1, "max_batched_tokens": 8, "max_model_len": 32}
        engine = tiny_engine(model, proposer, 7, runner_kind=GpuRunner, graph_depth=7, **few)
        engine.warm_up()
        engine.hooks.finish_idle_work()
        engine.speculator.set_enabled(is_on)
        submit, submitted = GraphBatch.submit, []
        monkeypatch.setattr(GraphBatch, "submit", lambda *args: submitted.append(step := submit(*args)) or step)
        run(engine, requests(SAMPLINGS[:1], max_tokens=12))
        assert any(step.shape.nodes for step in submitted) == is_on
        assert all(step.is_timed for step in submitted)

    def test_where_a_pass_has_no_room_for_the_tree_a_smaller_one_is_grown(self, monkeypatch):
        submit, shapes = GraphBatch.submit, []
        monkeypatch.setattr(
            GraphBatch, "submit", lambda batch, shape, *args: shapes.append(shape) or submit(batch, shape, *args)
        )
        self.run(requests(SAMPLINGS[:1], max_tokens=7), 11, max_num_seqs=1, max_batched_tokens=12)
        assert max(shape.nodes for shape in shapes) == 7  # with 15 a round would have 16 rows

    @pytest.mark.usefixtures("captures_with_a_run")
    def test_same_text(self, monkeypatch):
        replay = Graph.replay

        def watched(graph):
            with NoWaits():  # a graph can hold nothing that waits
                return replay(graph)

        monkeypatch.setattr(Graph, "replay", watched)
        assert self.run(requests(SAMPLINGS[1:3], max_tokens=7), 7).accepted > 0

    def test_depths_that_change_and_requests_that_arrive_late(self):
        asked = requests(SAMPLINGS[:2], max_tokens=5)
        assert self.run(asked, MixedDepth(7), arrivals=1).drafted > 0
