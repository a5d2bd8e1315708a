"""Graph steps, on a GPU or interpreted: the same text as plain decoding step by step."""

from dataclasses import replace

import pytest
import torch

from paceline.core.request import Request
from paceline.engine.audit.self_audit import BusyShare, SelfAudit
from paceline.engine.engine import Engine
from paceline.engine.graph import eligibility
from paceline.engine.graph import scheduler as graph_scheduler
from paceline.engine.graph.batch import GraphBatch
from paceline.engine.graph.executor import GraphExecutor
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.policy.depth.rules import FixedDepth
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import TINY, MixedDepth, draft_model, request, run, tiny_engine, tiny_model
from tests.specs import changed

# interpreted kernels take milliseconds each
SMALL = changed(TINY, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, ffn_size=16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_k": 5, "seed": 2},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02, "seed": 3},
)


def requests(count: int, max_tokens: int = 5, samplings=SAMPLINGS) -> list[Request]:
    lengths = (2, 14, 5, 8)  # one of them grows into its second block
    prompts = [[(7 * i + 3 * j) % TINY.vocab_size for j in range(length)] for i, length in enumerate(lengths[:count])]
    return [
        request(f"r{i}", prompt, **{**samplings[i % len(samplings)], "max_tokens": max_tokens + 2 * (i % 3)})
        for i, prompt in enumerate(prompts)
    ]


def graph_engine(proposer: DraftModelProposer | None, depth=3, max_depth=6, **options) -> Engine:
    model = tiny_model(config=SMALL, device=DEVICE)
    return tiny_engine(model, proposer, depth, runner_kind=GpuRunner, graph_depth=max_depth, **options)


def executor_of(engine: Engine) -> GraphExecutor:
    assert isinstance(engine.graph, GraphExecutor)
    return engine.graph


def check(engine: Engine, asked: list[Request], **options):
    model = tiny_model(config=SMALL, device=DEVICE)
    result = run(engine, asked, **options)
    check_contract(differences(model, asked, plain_text(model, asked), result.tokens), is_bitwise=False)
    return result


@pytest.mark.parametrize("sampling", range(len(SAMPLINGS)))
def test_plain_rounds(sampling):
    engine = graph_engine(None)
    check(engine, requests(1, samplings=SAMPLINGS[sampling:][:1]))
    assert engine.graph.num_steps > 0


@pytest.mark.usefixtures("captures_with_a_run")
def test_captured_graphs_read_the_new_weights():
    engine, other = graph_engine(None), tiny_model(seed=5, config=SMALL, device=DEVICE)
    check(engine, requests(2))
    engine.use_weights(other, "")
    asked = [replace(one, id=f"{one.id}.new") for one in requests(2)]
    expected = run(tiny_engine(other, runner_kind=GpuRunner, graph_depth=6), asked).tokens
    assert run(engine, asked).tokens == expected


@pytest.mark.usefixtures("captures_with_a_run")
def test_the_audit_runs_while_steps_are_in_flight():
    engine = graph_engine(None, audit_fraction=1.0)
    audit = engine.hooks.get(SelfAudit)
    audit._share, in_flight = BusyShare(0.2), []
    advance = audit._pass
    audit._pass = lambda: in_flight.append(engine.graph.num_inflight) or advance()
    check(engine, [replace(one, id=f"{one.id}.{i}") for i in range(2) for one in requests(2, max_tokens=4 + i)])
    counts = engine.status.snapshot().audit
    assert counts.busy_passes > 0
    assert max(in_flight) > 0
    assert (counts.texts > 0, counts.drifted) == (True, 0)


@pytest.mark.usefixtures("captures_with_a_run")
def test_plain_rounds_of_several():
    engine = graph_engine(None)
    check(engine, requests(4, max_tokens=7))
    assert engine.graph.num_steps > 3


@pytest.mark.usefixtures("captures_with_a_run")
def test_a_draft_that_is_sometimes_right():
    proposer = draft_model(tiny_model(perturb=0.3, config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer)
    result = check(engine, requests(4, max_tokens=7))
    assert 0 < result.accepted < result.drafted
    assert engine.graph.num_steps > 0


def test_a_draft_that_is_always_right():
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    result = check(graph_engine(proposer), requests(2, samplings=SAMPLINGS[:2]))
    assert result.accepted > 0.6 * result.drafted  # what a finished sequence did not need counts as not accepted


def test_depths_that_change_and_requests_that_arrive_late():
    proposer = draft_model(tiny_model(perturb=0.3, config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, MixedDepth(3), max_num_seqs=2)
    check(engine, requests(4, max_tokens=8), arrivals=2)
    assert 2 < engine.graph.num_steps < engine.num_steps  # the host took over for each arrival


class NowAndThenPlain(FixedDepth):
    """Of ten steps the last `plain` ones are."""

    def __init__(self, depth: int, plain: int) -> None:
        super().__init__(depth)
        self._plain, self._count = plain, 0

    def decide(self, batch):
        self._count += 1
        return [0] * len(batch) if self._count % 10 >= 10 - self._plain else super().decide(batch)


@pytest.mark.parametrize("plain", [2, pytest.param(3, marks=pytest.mark.interpreted)], ids=["follows", "catches up"])
def test_the_draft_survives_a_plain_step_now_and_then(plain, monkeypatch):
    """It follows two plain steps. After three it is behind, and its draft prefill runs beside another plain step."""
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    calls = {"collect": 0, "prefill": 0}

    def counted(name, inner):
        def call(*told):
            calls[name] += 1
            return inner(*told)

        return call

    for name in calls:
        monkeypatch.setattr(proposer, name, counted(name, getattr(proposer, name)))
    result = check(graph_engine(proposer, NowAndThenPlain(1, plain)), requests(1, max_tokens=40))
    assert result.accepted > 0.9 * result.drafted > 10
    assert calls["prefill"] == 1  # the batch was loaded once
    assert calls["collect"] == 0


@pytest.mark.parametrize(
    ("window", "num_blocks"),
    [pytest.param(24, 64, marks=pytest.mark.interpreted), (SMALL.max_position, 2)],
    ids=["window", "cache"],
)
def test_a_sequence_the_draft_has_no_room_for_decodes_plainly_in_the_graph(window, num_blocks):
    model = tiny_model(config=replace(SMALL, max_position=window), device=DEVICE)
    engine = graph_engine(draft_model(model, num_blocks, runner=GpuRunner), max_model_len=64)
    result = check(engine, [request("r0", [1, 2, 3, 4, 5], temperature=0.0, max_tokens=45)])
    assert 0 < result.accepted < 30  # as far as there was room
    assert engine.num_steps - engine.graph.num_steps < 10


def test_graph_steps_continue_while_a_request_waits_for_blocks():
    engine = graph_engine(None, kv_tokens=64, max_num_seqs=4)  # four blocks: two sequences of two
    check(engine, requests(4, max_tokens=12))
    assert engine.graph.num_steps > 0.5 * engine.num_steps


def steps_before_admission(engine: Engine, arrival: Request) -> int:
    """Graph steps after a host step until the request that arrived then is admitted."""
    engine.add(request("first", [1, 2, 3], temperature=0.0, max_tokens=24))
    engine.step()
    engine.add(arrival)
    rounds, graph = 0, executor_of(engine)
    while len(engine.scheduler.running) < 2:
        engine.step()
        rounds = max(rounds, graph._eligibility.num_steps)
    return rounds


@pytest.mark.parametrize(("small", "steps"), [(1, 1), (16, 0)])
def test_a_large_batch_that_cannot_be_joined_admits_after_a_few_steps(monkeypatch, small, steps):
    monkeypatch.setattr(eligibility, "SMALL_BATCH", small)
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, depth=1, max_batched_tokens=64)
    executor_of(engine)._batches.can_join = False
    assert steps_before_admission(engine, request("r", [1] * 9)) == steps


def test_prompts_that_fill_half_a_pass_are_admitted_at_once():
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, depth=1, max_batched_tokens=64)
    executor_of(engine)._batches.can_join = False
    assert steps_before_admission(engine, request("r", [1] * 32)) == 0


@pytest.fixture
def collected(monkeypatch) -> list[list[int]]:
    """Sequences that the host drafted for, by step."""
    asked, collect = [], DraftModelProposer.collect
    monkeypatch.setattr(
        DraftModelProposer, "collect", lambda self, ids, deadline: asked.append(ids) or collect(self, ids, deadline)
    )
    return asked


@pytest.mark.parametrize("length", [20, pytest.param(150, marks=pytest.mark.interpreted)])
def test_after_prompts_of_the_host_the_graph_drafts(collected, length):
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, max_num_seqs=2, kv_tokens=512)
    executor_of(engine)._batches.can_join = False  # prompts cannot join
    asked = [
        request("r0", [1, 2, 3, 4], temperature=0.0, max_tokens=24),
        request("r1", [i % 7 for i in range(length)], temperature=0.0, max_tokens=6),
    ]
    result = check(engine, asked, arrivals=1)
    assert collected == []
    assert result.accepted > 10


def test_a_probe_stays_in_the_graph(collected):
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, OneOfAll(1))
    result = check(engine, requests(4))
    assert result.drafted > 2
    assert collected == []
    assert engine.graph.num_steps > 2


def test_a_few_drafting_sequences_are_not_a_probe(collected, monkeypatch):
    monkeypatch.setattr(graph_scheduler, "PROBED", 0)
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    check(graph_engine(proposer, OneOfAll(1)), requests(4))
    assert collected


def test_a_prompt_without_room_does_not_count_as_prompt_rows():
    engine = graph_engine(None, kv_tokens=64, max_num_seqs=4)
    for one in requests(4, max_tokens=12):
        engine.add(one)
    engine.step()
    assert engine.scheduler.waiting
    assert not engine.scheduler.may_admit
    assert engine.scheduler.prompt_rows() == 0


class OneOfAll(FixedDepth):
    """Drafts for the first alone, as a probe does."""

    def decide(self, batch):
        return [*super().decide(batch)[:1], *[0] * (len(batch) - 1)]


def test_drafts_for_few_are_made_beside_a_prompt(collected):
    """On a busy server every host step has a prompt: drafting in the graph would interrupt it again and again."""
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, OneOfAll(2))
    *others, last = requests(4)
    for one in others:
        engine.add(one)
    engine.step()
    engine.add(last)
    engine.step()
    assert len(engine.scheduler.running) == 4
    assert [len(ids) for ids in collected] == [1]


def test_a_cancelled_sequence_leaves_the_others_alone():
    engine = graph_engine(draft_model(tiny_model(perturb=0.3, config=SMALL, device=DEVICE), runner=GpuRunner))
    asked = requests(3, max_tokens=7)
    for one in asked:
        engine.add(one)
    tokens: dict[str, list[int]] = {one.id: [] for one in asked}
    for _ in range(4):
        for output in engine.step():
            tokens[output.request_id].extend(output.tokens)
    assert engine.graph.num_steps > 0
    engine.cancel("r1")
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].extend(output.tokens)
    plain = plain_text(tiny_model(config=SMALL, device=DEVICE), asked)
    assert tokens["r0"] == plain["r0", 0]
    assert tokens["r2"] == plain["r2", 0]
    assert engine.scheduler.tables.pool.num_free == engine.scheduler.tables.pool.num_blocks


@pytest.mark.interpreted
def test_a_step_has_at_most_max_batched_tokens_rows(monkeypatch):
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, max_num_seqs=4, max_batched_tokens=12)
    drafted = []
    monkeypatch.setattr(
        GraphBatch,
        "submit",
        lambda batch, shape, *rest, submit=GraphBatch.submit: (
            drafted.append((batch.size, shape.nodes)) or submit(batch, shape, *rest)
        ),
    )
    check(engine, requests(4, max_tokens=24))
    assert max(nodes for size, nodes in drafted if size == 4) == 2  # 3 are wanted


class Deeper(FixedDepth):
    """Drafts two tokens, and later `depth`."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._count = 0

    def decide(self, batch):
        self._count += 1
        return [2 if self._count < 6 else depth for depth in super().decide(batch)]


@pytest.mark.interpreted
def test_steps_are_observed_with_their_padding():
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine, steps = graph_engine(proposer, depth=2), []
    observe = engine.speculator.depth.observe
    engine.speculator.depth.observe = lambda step: steps.append(step) or observe(step)
    check(engine, requests(3, max_tokens=6))
    assert {(step.batch, step.num_slots, step.rows) for step in steps if step.slots} >= {(3, 4, 12), (2, 4, 12)}


@pytest.mark.usefixtures("captures_with_a_run")
@pytest.mark.interpreted
def test_warm_up_leaves_the_cache_unchanged():
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, depth=1, max_depth=1, max_num_seqs=2, max_model_len=32)
    runner = engine.runner
    before = [tensor[: runner.num_blocks].clone() for layer in runner.cache for tensor in layer]
    engine.warm_up()
    engine.hooks.finish_idle_work()
    after = [tensor[: runner.num_blocks] for layer in runner.cache for tensor in layer]
    assert all(map(torch.equal, before, after))
    check(engine, requests(2))
    assert engine.graph.num_steps > 0


@pytest.mark.usefixtures("captures_with_a_run")
@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled where kernels are interpreted")
def test_nothing_is_compiled_after_warm_up(monkeypatch):
    import triton

    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner)
    engine = graph_engine(proposer, max_num_seqs=4)
    engine.warm_up()
    engine.hooks.finish_idle_work()
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **told: compiled.append(told["repr"]))
    check(engine, requests(4))
    assert not compiled


@pytest.mark.parametrize("has_draft", [False, True], ids=["plain", "drafts"])
def test_no_step_is_submitted_behind_the_last_one(has_draft):
    """A step behind the one that ends all texts would make the next request wait."""
    proposer = draft_model(tiny_model(config=SMALL, device=DEVICE), runner=GpuRunner) if has_draft else None
    engine = graph_engine(proposer)
    asked = [replace(one, sampling=replace(one.sampling, max_tokens=6)) for one in requests(2, samplings=SAMPLINGS[:1])]
    check(engine, asked)
    assert engine.graph.num_steps == engine.executors.counts["graph"] > 0
