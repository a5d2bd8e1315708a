"""Biases, penalties, blocked end tokens and log-probabilities inside graph steps, on a GPU or interpreted: the text of plain
decoding, with neighbours that have none of them."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.engine.graph import batch as device_batch
from paceline.engine.graph import slots as device_slots
from paceline.engine.graph.drafter import NO_DRAFTS, DraftShape
from paceline.engine.graph.slot_params import WARM_UP_FEATURES
from paceline.engine.step.step import GRAPH, HostReason
from paceline.models.runner.gpu.runner import GpuRunner
from paceline.speculation.distribution import distribution
from tests.engine.graph.oracle import OracleProposer
from tests.engine.graph.test_executor import DEVICE, SMALL, check, executor_of, graph_engine
from tests.exactness.suite import plain_text
from tests.exactness.test_logprobs import Scores, scored, texts
from tests.fakes import MixedDepth, Result, draft_model, request, run, tiny_engine, tiny_model

ENDS = tuple(range(0, SMALL.vocab_size, 3))
FEATURES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "counts": {"presence_penalty": 0.4, "frequency_penalty": 1.3},
    "bias": {"logit_bias": {3: 1.5, 7: -100.0, 11: 0.7}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": ENDS},
    "logprobs": {"logprobs": 3},
}
TRIPLES = list(itertools.combinations(FEATURES, 3))
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 4},
)


def together(names: tuple[str, ...]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in names:
        merged |= FEATURES[name]
    return merged


def asked(combinations: list[tuple[str, ...]], max_tokens: int = 9) -> list[Request]:
    """A request for each combination, with the kinds of sampling in turn, and neighbours without a feature."""
    found = []
    for i, names in enumerate(combinations):
        prompt = [(5 * i + 3 * j) % 7 for j in range(3 + i % 3)]
        found.append(request(f"r{i}", prompt, **KINDS[i % 3], **together(names), max_tokens=max_tokens))
        if i % 2:
            found.append(request(f"n{i}", prompt, **KINDS[(i + 1) % 3], max_tokens=max_tokens))
    return found


def drafting(depth: Any = 3, perturb: float = 0.1, **options: Any) -> Engine:
    model = tiny_model(perturb=perturb, config=SMALL, device=DEVICE)
    return graph_engine(draft_model(model, runner=GpuRunner), depth=depth, **options)


def check_in_graphs(engine: Engine, requests: list[Request], **options: Any) -> Result:
    """The text of plain decoding, and no step on the host because of sampling."""
    result = check(engine, requests, **options)
    assert HostReason.SAMPLING not in engine.executors.counts
    assert engine.executors.counts[GRAPH] > 0
    return result


EACH_AND_SOME: list[tuple[str, ...]] = [*((name,) for name in FEATURES), *TRIPLES[::3]]


def test_chains_of_every_feature_in_slots_that_are_used_again() -> None:
    """Prompts end in mixed steps, with drafts and without, and sequences follow others in their slots."""
    result = check_in_graphs(drafting(max_num_seqs=4), asked(EACH_AND_SOME, max_tokens=7), arrivals=2)
    assert 0 < result.accepted < result.drafted


def test_depths_that_change() -> None:
    check_in_graphs(drafting(MixedDepth(3), max_num_seqs=3), asked(TRIPLES[1::3]), arrivals=1)


def test_preemption_counts_again() -> None:
    names = [("repetition", "counts", "bias"), ("counts",)]
    engine, requests = graph_engine(None, kv_tokens=96, max_num_seqs=3), asked(names, max_tokens=36)
    check_in_graphs(engine, requests)
    assert engine.scheduler.num_preemptions > 0


def tree_engine(monkeypatch: pytest.MonkeyPatch, requests: list[Request]) -> Engine:
    model = tiny_model(config=SMALL, device=DEVICE)
    proposer = OracleProposer(plain_text(model, requests))
    monkeypatch.setattr(device_batch, "make_drafter", proposer.drafter)
    return tiny_engine(model, proposer, 7, runner_kind=GpuRunner, graph_depth=7)


def test_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = asked(EACH_AND_SOME[1:6])
    assert check_in_graphs(tree_engine(monkeypatch, requests), requests).accepted > 5


@pytest.mark.usefixtures("captures_with_a_run")
def test_captured_graphs_of_the_features_have_the_same_text() -> None:
    """Without warm-up, a step accepts tokens with features without a graph."""
    engine, requests = drafting(max_num_seqs=1, depth=2), asked(EACH_AND_SOME[:2], max_tokens=6)
    check_in_graphs(engine, requests)
    batch = executor_of(engine)._batches.of(1)
    assert not any(key.part == "accept" and key.sampling.has_features for key in batch._graphs)
    for params in WARM_UP_FEATURES:
        batch._capture(DraftShape(2, 2), params)
        batch._capture(NO_DRAFTS, params)
    check_in_graphs(engine, [replace(one, id=f"{one.id}.again") for one in requests])
    assert {key.sampling.is_edited for key in batch._graphs if key.part == "draft"} == {False, True}
    assert not any(key.sampling.kind == "sampled" for key in batch._eager if not key.sampling.is_scored)


def has_other_texts(engine: Engine, requests: list[Request]) -> bool:
    return run(engine, requests).tokens != plain_text(tiny_model(config=SMALL, device=DEVICE), requests)


@pytest.mark.parametrize("shape", ["chain", pytest.param("tree", marks=pytest.mark.interpreted)])
def test_counts_that_miss_the_drafts_before_a_row_are_found(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    edit = device_slots.edit_logits
    requests = asked([("counts", "repetition")] * 3, max_tokens=14)
    engine = drafting(perturb=0.0) if shape == "chain" else tree_engine(monkeypatch, requests)
    monkeypatch.setattr(device_slots, "edit_logits", lambda *args: edit(*args[:-1], None))
    assert has_other_texts(engine, requests)


def test_committed_tokens_that_are_not_counted_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_slots, "count_tokens", lambda *args: None)
    assert has_other_texts(graph_engine(None), asked([("counts",)] * 3, max_tokens=14))


def test_the_draft_model_drafts_with_penalties() -> None:
    """The draft is the target, so that it would be wrong at every token that a penalty changes."""
    requests = [request(f"r{i}", [i, 2, 3], temperature=0.0, max_tokens=24, **FEATURES["counts"]) for i in range(2)]
    engine = drafting(perturb=0.0)
    for size in (1, 2):
        executor_of(engine)._batches.of(size)._capture(DraftShape(3, 3), WARM_UP_FEATURES[0])
    result = check_in_graphs(engine, requests)
    assert result.accepted > 0.8 * result.drafted > 0


def decoded(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], Scores]]:
    return {name: found for (name, _), found in texts(engine, requests).items()}


@pytest.mark.parametrize("kind", ["chain", "plain"])
def test_log_probabilities_are_those_of_a_scoring_pass(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(distribution, "uses_gpu_kernels", lambda device: True)  # the host's are the kernel's too
    requests = asked([("logprobs",), ("counts", "bias", "logprobs"), ("logprobs",)], max_tokens=7)
    engine = drafting() if kind == "chain" else graph_engine(None)
    for ids, scores in decoded(engine, requests).values():
        expected = scored(graph_engine(None), ids, len(scores))
        for mine, theirs in zip(scores, expected, strict=True):
            assert (mine.token, mine.rank) == (theirs.token, theirs.rank)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert mine.logprob == pytest.approx(theirs.logprob, rel=0, abs=1e-5)
    assert HostReason.SAMPLING not in engine.executors.counts


def rejecting(name: str, **speculation: Any) -> Request:
    asked = {"verification": "rejection", **speculation}
    return request(name, [4, 5, len(name)], asked, temperature=0.8, seed=1, max_tokens=7)


def test_rejection_next_to_others_decodes_plainly_in_graphs() -> None:
    """With the noise of plain decoding under rejection, and next to sequences that draft."""
    others = asked([("counts",)], max_tokens=60)
    engine, requests = drafting(audit_fraction=1.0), [*others, rejecting("r"), rejecting("other")]
    result = check_in_graphs(engine, requests, arrivals=1)
    assert result.accepted > 0
    engine.hooks.finish_idle_work()
    counts = engine.status.snapshot().audit
    assert (counts.texts, counts.drifted) == (3, 0)
    assert result.tokens["r", 0] != run(graph_engine(None), [coupled(rejecting("r"))]).tokens["r", 0]


def coupled(request: Request) -> Request:
    return replace(request, speculation=replace(request.speculation, verification="coupled"))


def test_few_sequences_under_rejection_alone_draft_on_the_host() -> None:
    engine = drafting()
    assert run(engine, [rejecting("r")]).drafted > 0
    assert engine.executors.counts[HostReason.SAMPLING] > 0
    engine = drafting()
    assert run(engine, [rejecting("r" * i) for i in range(1, 6)]).tokens
    assert engine.executors.counts[GRAPH] > 0
    without = graph_engine(None)
    check_in_graphs(without, [rejecting("r")])


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("names", TRIPLES, ids="-".join)
def test_every_combination_of_three(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], kind: int) -> None:
    requests = [
        request(
            f"r{i}", [(5 * i + j) % 7 for j in range(4)], max_tokens=12, **KINDS[kind], **(together(names) if i else {})
        )
        for i in range(4)
    ]
    check_in_graphs(drafting(max_num_seqs=3), requests, arrivals=1)
    check_in_graphs(graph_engine(None, max_num_seqs=3), requests, arrivals=1)
    check_in_graphs(tree_engine(monkeypatch, requests), requests)
