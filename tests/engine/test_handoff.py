"""A prompt computed by one engine and decoded by another: the same text, the same drafts, and nothing held afterwards."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.engine.engine import Engine
from paceline.engine.hooks.exports import Exports
from paceline.engine.hooks.handoff_plan import BlockPart, CacheLayout, HandoffPlan, Part, StatePart
from paceline.engine.hooks.imports import Arrival, Imports
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.cuda_graph import StreamEvent
from paceline.models.kv_blocks import read_layer
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposers.eagle import EagleProposer
from paceline.speculation.proposers.pending import SEQUENCE_ROWS
from tests.engine.harness import GREEDY, MODEL, SAMPLED, assert_nothing_held, engine_of, outputs_of, request, tokens_of
from tests.heads import eagle

LONG = tuple((7 * i + i // 11) % 40 for i in range(199))


class Copy:
    """A sink that copies everything the moment it hears of it: later the engine may have gone on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.layers: dict[int, bytes] = {}
        self.rows: list[tuple[int, Mapping[int, Tensor]]] = []
        self.heard: list[tuple[int, int]] = []

    def blocks(self, layer: int, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        ready.wait()
        out = bytearray(len(blocks) * CacheLayout.of(self.engine.runner).layer_bytes)
        read_layer(self.engine.runner, layer, blocks, out)
        self.layers[layer] = bytes(out)
        self.heard.append((layer, len(blocks)))

    def states(self, start: int, states: Mapping[int, Tensor], ready: StreamEvent) -> None:
        self.rows.append((start, states))

    def bytes_of(self, plan: HandoffPlan, part: Part) -> bytearray:
        size = plan.layout.layer_bytes
        if isinstance(part, BlockPart):
            return bytearray(self.layers[part.layer][part.start * size : part.stop * size])
        first = self.rows[0][0]
        rows = [torch.cat([states[layer] for _, states in self.rows]) for layer in plan.state_layers]
        return bytearray(torch.stack([r[part.start - first : part.stop - first] for r in rows]).cpu().numpy().tobytes())


def giver(**options: Any) -> Engine:
    engine = engine_of(**options)
    engine.exports = Exports(engine.runner, engine.scheduler.tables)
    return engine


def taker(proposer: EagleProposer | None = None, **options: Any) -> Engine:
    engine = engine_of(proposer, **options)
    engine.imports = Imports(engine.runner, engine.scheduler, engine.speculator, engine.validator.limits.max_model_len)
    return engine


def give(engine: Engine, ids: Sequence[int], plan: HandoffPlan, salt: str = "") -> Copy:
    """Computes what `plan` says of `ids`, as a prefill worker does."""
    assert engine.exports is not None
    sink = Copy(engine)
    engine.exports.begin("export", plan, sink)
    off = SpeculationParams(enabled=False)
    hit = plan.first_state if plan.state_layers else None
    prompt = tuple(ids[: plan.num_tokens])
    engine.add(Request("export", prompt, SamplingParams(max_tokens=1), off, cache_salt=salt, max_cached_tokens=hit))
    while engine.has_work:
        engine.step()
    engine.exports.end("export")
    return sink


def hand_over(source: Engine, target: Engine, one: Request, states: bool = False) -> Arrival:
    assert target.imports is not None
    layers = target.speculator.proposers["fake"].traits.hidden.layers if states else ()  # type: ignore[union-attr]
    arrival = target.imports.reserve(one.id, one.prompt_ids, one.cache_salt, layers, SEQUENCE_ROWS if states else 0)
    assert arrival is not None
    sink = give(source, one.prompt_ids, arrival.plan, one.cache_salt)
    for part in arrival.plan.parts():
        data = sink.bytes_of(arrival.plan, part)
        assert len(data) == arrival.plan.size(part)
        arrival.write(part, data)
    target.imports.land(arrival, arrival.plan.end)
    return arrival


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, {**SAMPLED, "n": 3}], ids=["greedy", "seeded", "three"])
def test_the_text_is_that_of_one_engine(sampling: dict[str, Any]) -> None:
    one = request("r", LONG, **sampling)
    expected = outputs_of(engine_of(), one)
    target = taker()
    hand_over(giver(), target, one)
    outputs = outputs_of(target, one)
    for choice in range(one.sampling.n):
        assert tokens_of(outputs, "r", choice) == tokens_of(expected, "r", choice)
    assert target.num_steps == one.sampling.max_tokens + (one.sampling.n > 1)  # no step for the prompt alone
    assert outputs[0].num_cached == 192
    assert outputs_of(target, request("again", LONG, **GREEDY))[0].num_cached == 192  # published like any other


def test_layers_are_told_while_the_pass_runs_and_chunk_by_chunk() -> None:
    source = giver(max_batched_tokens=64)
    plan = HandoffPlan(CacheLayout.of(source.runner), 0, 12)
    sink = give(source, LONG, plan)
    layers = MODEL.config.num_layers
    assert sink.heard == [(layer, 4 * chunk) for chunk in (1, 2, 3) for layer in range(layers)]
    assert_nothing_held(source)


def test_only_what_is_missing_is_handed_over() -> None:
    target = taker()
    outputs_of(target, request("before", LONG[:70], max_tokens=1))
    one = request("r", LONG, **GREEDY)
    arrival = hand_over(giver(), target, one)
    assert (arrival.plan.first, arrival.plan.end, arrival.num_cached) == (4, 12, 64)
    assert tokens_of(outputs_of(target, one)) == tokens_of(outputs_of(engine_of(), one))


def test_a_giver_that_has_the_prompt_cached_gives_it_from_there() -> None:
    source, target, one = giver(), taker(), request("r", LONG, **GREEDY)
    outputs_of(source, request("before", LONG, max_tokens=1))
    steps = source.num_steps
    hand_over(source, target, one)
    assert source.num_steps == steps + 1
    assert tokens_of(outputs_of(target, one)) == tokens_of(outputs_of(engine_of(), one))


def test_another_tenant_does_not_hit_what_was_handed_over() -> None:
    target = taker()
    one = Request("r", LONG, SamplingParams(max_tokens=4, temperature=0.0, seed=3), cache_salt="mine")
    hand_over(giver(), target, one)
    assert outputs_of(target, one)[0].num_cached == 192
    assert outputs_of(target, request("theirs", LONG, max_tokens=1))[0].num_cached == 0


class Recorded(EagleProposer):
    """Keeps what it drafted."""

    drafts: list[tuple[list[int], list[int]]]

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        batch = super().collect(sequence_ids, deadline)
        self.drafts.append((batch.tokens.tolist(), batch.parents.tolist()))
        return batch


def recorded() -> Recorded:
    inner = eagle(MODEL)
    proposer = Recorded(inner.runner, 64)
    proposer.drafts = []
    return proposer


@pytest.mark.parametrize("hit_there", [False, True])
def test_an_eagle_head_drafts_what_it_would_have_drafted(hit_there: bool) -> None:
    one = request("r", LONG, **GREEDY)
    here, there = recorded(), recorded()
    expected = outputs_of(engine_of(here, 6), one)
    source, target = giver(), taker(there, depth=6)
    if hit_there:  # states are not cached: what they are wanted of is computed again
        outputs_of(source, request("before", LONG, max_tokens=1))
    hand_over(source, target, one, states=True)
    outputs = outputs_of(target, one)
    assert tokens_of(outputs) == tokens_of(expected)
    assert there.drafts == here.drafts
    assert [o.accepted for o in outputs] == [o.accepted for o in expected]
    assert_nothing_held(source)


def test_without_its_states_the_head_would_draft_something_else() -> None:
    """Otherwise the test above could not fail."""
    one = request("r", LONG, **GREEDY)
    here, there = recorded(), recorded()
    outputs_of(engine_of(here, 6), one)
    target = taker(there, depth=6)
    hand_over(giver(), target, one)
    outputs_of(target, one)
    assert there.drafts != here.drafts


def test_a_part_of_it_is_better_than_nothing() -> None:
    target, one = taker(), request("r", LONG, **GREEDY)
    assert target.imports is not None
    arrival = target.imports.reserve("r", LONG, "")
    assert arrival is not None
    sink = give(giver(), LONG, arrival.plan)
    first, *_ = parts = [part for part in arrival.plan.parts() if isinstance(part, BlockPart)]
    for part in parts:
        if part.start == first.start:
            arrival.write(part, sink.bytes_of(arrival.plan, part))
    target.imports.land(arrival, first.stop)
    outputs = outputs_of(target, one)
    assert outputs[0].num_cached == first.stop * BLOCK_SIZE
    assert tokens_of(outputs) == tokens_of(outputs_of(engine_of(), one))


def test_what_was_reserved_is_given_back() -> None:
    target = taker()
    assert target.imports is not None
    arrival = target.imports.reserve("r", LONG, "")
    assert arrival is not None
    assert target.scheduler.tables.pool.num_free == 64 - 12
    target.imports.release(arrival)
    assert_nothing_held(target)
    one = request("r", LONG, **GREEDY)
    hand_over(giver(), target, one)
    target.add(one)
    target.cancel("r")  # before it had a seat
    assert_nothing_held(target)


def test_reservations_leave_room_for_a_sequence_of_full_length() -> None:
    target = taker(kv_tokens=512)  # 32 blocks, 16 of them for a sequence of 256
    assert target.imports is not None
    first = target.imports.reserve("a", LONG, "")
    assert first is not None
    assert target.imports.reserve("b", LONG[::-1], "") is None
    whole = request("whole", LONG[5:] + LONG[:40], max_tokens=10, **GREEDY)
    target.add(whole)
    tokens = []
    while target.has_work:
        tokens += tokens_of(target.step(), "whole")
    assert len(tokens) == 10
    target.imports.release(first)
    assert target.imports.reserve("b", LONG[::-1], "") is not None


def test_nothing_is_reserved_for_what_is_short_or_here() -> None:
    target = taker()
    assert target.imports is not None
    assert target.imports.reserve("r", LONG[:16], "") is None
    outputs_of(target, request("before", LONG, max_tokens=1))
    assert target.imports.reserve("r", LONG, "") is None
    assert target.imports.cached(LONG, "") == 192
    assert_nothing_held(target)


def test_a_giver_that_is_preempted_gives_the_same() -> None:
    source = giver(max_batched_tokens=40)
    plan = HandoffPlan(CacheLayout.of(source.runner), 0, 10, (0, 1), 64)
    expected = give(giver(), LONG, plan)
    assert source.exports is not None
    sink = Copy(source)
    source.exports.begin("export", plan, sink)
    source.add(Request("export", LONG[:160], SamplingParams(max_tokens=1), max_cached_tokens=plan.first_state))
    for _ in range(3):
        source.step()
    source.scheduler._preempt(source.scheduler.running[0])
    source.add(request("between", LONG[::-1][:100], max_tokens=3))  # takes what became free
    while source.has_work:
        source.step()
    source.exports.end("export")
    assert_nothing_held(source)
    for part in plan.parts():
        assert sink.bytes_of(plan, part) == expected.bytes_of(plan, part)


def test_parts_cover_everything_once() -> None:
    layout = CacheLayout(3, 64, 32, "kv", "states")
    plan = HandoffPlan(layout, 5, 30, (0, 3), 100)
    parts = plan.parts()
    covered = [(p.layer, b) for p in parts if isinstance(p, BlockPart) for b in range(p.start, p.stop)]
    assert sorted(covered) == [(layer, b) for layer in range(3) for b in range(5, 30)]
    rows = [t for p in parts if isinstance(p, StatePart) for t in range(p.start, p.stop)]
    assert rows == list(range(380, 480))
    assert sum(map(plan.size, parts)) == 3 * 25 * 64 + 2 * 100 * 32
    huge = HandoffPlan(CacheLayout(80, 64, 32, "kv", "states"), 0, 65536)
    assert len(huge.parts()) <= 8192
    for wrong in ({"first": 3, "end": 3}, {"first": 0, "end": 2, "state_layers": (4,)}):
        with pytest.raises(ValueError, match=r"are none|no states"):
            HandoffPlan(layout, **wrong)  # type: ignore[arg-type]
