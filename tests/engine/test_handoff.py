"""Hand-off between two engines: the same text, the same drafts, and no block held afterwards."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.engine import Engine
from paceline.engine.hooks.handoff import (
    BlockPart,
    CacheLayout,
    HandoffPlan,
    KvExports,
    KvImports,
    Part,
    PromptImport,
    StatePart,
)
from paceline.models.blocks.kv_blocks import read_layer
from paceline.models.device.cuda_graph import StreamEvent
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.eagle.eagle_cache import SEQUENCE_ROWS
from tests.engine.harness import GREEDY, MODEL, SAMPLED, assert_nothing_held, engine_of, outputs_of, request, tokens_of
from tests.heads import eagle

LONG = tuple((7 * i + i // 11) % 40 for i in range(199))


class CopySink:
    """A sink that copies everything at once, before the engine continues."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.layers: dict[int, bytes] = {}
        self.rows: list[tuple[int, Mapping[int, Tensor]]] = []
        self.reported: list[tuple[int, int]] = []

    def blocks(self, layer: int, blocks: tuple[int, ...], ready: StreamEvent) -> None:
        ready.wait()
        out = bytearray(len(blocks) * CacheLayout.of(self.engine.runner).layer_bytes)
        read_layer(self.engine.runner, layer, blocks, out)
        self.layers[layer] = bytes(out)
        self.reported.append((layer, len(blocks)))

    def states(self, start: int, states: Mapping[int, Tensor], ready: StreamEvent) -> None:
        self.rows.append((start, states))

    def bytes_of(self, plan: HandoffPlan, part: Part) -> bytearray:
        size = plan.layout.layer_bytes
        if isinstance(part, BlockPart):
            return bytearray(self.layers[part.layer][part.start * size : part.stop * size])
        first = self.rows[0][0]
        rows = [torch.cat([states[layer] for _, states in self.rows]) for layer in plan.state_layers]
        return bytearray(torch.stack([r[part.start - first : part.stop - first] for r in rows]).cpu().numpy().tobytes())


def prefill_engine(**options: Any) -> Engine:
    return engine_of(**options)


def decode_engine(proposer: EagleProposer | None = None, **options: Any) -> Engine:
    return engine_of(proposer, **options)


def compute_export(engine: Engine, ids: Sequence[int], plan: HandoffPlan, salt: str = "") -> CopySink:
    """Compute the parts of `plan` for `ids`, as a prefill worker does."""
    sink = CopySink(engine)
    engine.hooks.get(KvExports).begin("export", plan, sink)
    off = SpeculationParams(enabled=False)
    hit = plan.first_state if plan.state_layers else None
    prompt = tuple(ids[: plan.num_tokens])
    engine.add(
        engine.validate(
            Request("export", prompt, SamplingParams(max_tokens=1), off, cache_salt=salt, max_cached_tokens=hit)
        )
    )
    while engine.has_work:
        engine.step()
    engine.hooks.get(KvExports).end("export")
    return sink


def hand_off(source: Engine, target: Engine, one: Request, states: bool = False) -> PromptImport:
    layers = target.speculator.proposers["fake"].traits.hidden.layers if states else ()  # type: ignore[union-attr]
    incoming = target.hooks.get(KvImports).reserve(
        one.id, one.prompt_ids, one.cache_salt, layers, SEQUENCE_ROWS if states else 0
    )
    assert incoming is not None
    sink = compute_export(source, one.prompt_ids, incoming.plan, one.cache_salt)
    for part in incoming.plan.parts():
        data = sink.bytes_of(incoming.plan, part)
        assert len(data) == incoming.plan.size(part)
        incoming.write(part, data)
    target.hooks.get(KvImports).publish(incoming, incoming.plan.end)
    return incoming


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, {**SAMPLED, "n": 3}], ids=["greedy", "seeded", "three"])
def test_the_text_equals_that_of_one_engine(sampling: dict[str, Any]) -> None:
    one = request("r", LONG, **sampling)
    expected = outputs_of(engine_of(), one)
    target = decode_engine()
    hand_off(prefill_engine(), target, one)
    outputs = outputs_of(target, one)
    for choice in range(one.sampling.n):
        assert tokens_of(outputs, "r", choice) == tokens_of(expected, "r", choice)
    assert target.num_steps == one.sampling.max_tokens + (one.sampling.n > 1)  # no step for the prompt alone
    assert outputs[0].num_cached == 192
    assert outputs_of(target, request("again", LONG, **GREEDY))[0].num_cached == 192  # an ordinary prefix hit


def test_layers_are_reported_during_the_pass_chunk_by_chunk() -> None:
    source = prefill_engine(max_batched_tokens=64)
    plan = HandoffPlan(CacheLayout.of(source.runner), 0, 12)
    sink = compute_export(source, LONG, plan)
    layers = MODEL.config.num_layers
    assert sink.reported == [(layer, 4 * chunk) for chunk in (1, 2, 3) for layer in range(layers)]
    assert_nothing_held(source)


def test_only_missing_blocks_are_handed_off() -> None:
    target = decode_engine()
    outputs_of(target, request("before", LONG[:70], max_tokens=1))
    one = request("r", LONG, **GREEDY)
    incoming = hand_off(prefill_engine(), target, one)
    assert (incoming.plan.first, incoming.plan.end, incoming.num_cached) == (4, 12, 64)
    assert tokens_of(outputs_of(target, one)) == tokens_of(outputs_of(engine_of(), one))


def test_a_cached_prompt_is_exported_without_computing_it() -> None:
    source, target, one = prefill_engine(), decode_engine(), request("r", LONG, **GREEDY)
    outputs_of(source, request("before", LONG, max_tokens=1))
    steps = source.num_steps
    hand_off(source, target, one)
    assert source.num_steps == steps + 1
    assert tokens_of(outputs_of(target, one)) == tokens_of(outputs_of(engine_of(), one))


def test_another_tenant_gets_no_prefix_hit() -> None:
    target = decode_engine()
    one = Request("r", LONG, SamplingParams(max_tokens=4, temperature=0.0, seed=3), cache_salt="mine")
    hand_off(prefill_engine(), target, one)
    assert outputs_of(target, one)[0].num_cached == 192
    assert outputs_of(target, request("theirs", LONG, max_tokens=1))[0].num_cached == 0


class RecordingProposer(EagleProposer):
    """Records its drafts."""

    drafts: list[tuple[list[int], list[int]]]

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        batch = super().collect(sequence_ids, deadline)
        self.drafts.append((batch.tokens.tolist(), batch.parents.tolist()))
        return batch


def recording_proposer() -> RecordingProposer:
    inner = eagle(MODEL)
    proposer = RecordingProposer(inner.runner, 64)
    proposer.drafts = []
    return proposer


@pytest.mark.parametrize("is_cached_at_source", [False, True])
def test_an_eagle_head_drafts_as_without_a_hand_off(is_cached_at_source: bool) -> None:
    one = request("r", LONG, **GREEDY)
    reference, proposer = recording_proposer(), recording_proposer()
    expected = outputs_of(engine_of(reference, 6), one)
    source, target = prefill_engine(), decode_engine(proposer, depth=6)
    if is_cached_at_source:  # hidden states are not cached: tokens that need them are computed again
        outputs_of(source, request("before", LONG, max_tokens=1))
    hand_off(source, target, one, states=True)
    outputs = outputs_of(target, one)
    assert tokens_of(outputs) == tokens_of(expected)
    assert proposer.drafts == reference.drafts
    assert [o.accepted for o in outputs] == [o.accepted for o in expected]
    assert_nothing_held(source)


def test_without_hidden_states_the_head_drafts_differently() -> None:
    """Shows that the test above can fail."""
    one = request("r", LONG, **GREEDY)
    reference, proposer = recording_proposer(), recording_proposer()
    outputs_of(engine_of(reference, 6), one)
    target = decode_engine(proposer, depth=6)
    hand_off(prefill_engine(), target, one)
    outputs_of(target, one)
    assert proposer.drafts != reference.drafts


def test_an_incomplete_hand_off_is_used_as_far_as_it_goes() -> None:
    target, one = decode_engine(), request("r", LONG, **GREEDY)
    incoming = target.hooks.get(KvImports).reserve("r", LONG, "")
    assert incoming is not None
    sink = compute_export(prefill_engine(), LONG, incoming.plan)
    first, *_ = parts = [part for part in incoming.plan.parts() if isinstance(part, BlockPart)]
    for part in parts:
        if part.start == first.start:
            incoming.write(part, sink.bytes_of(incoming.plan, part))
    target.hooks.get(KvImports).publish(incoming, first.stop)
    outputs = outputs_of(target, one)
    assert outputs[0].num_cached == first.stop * BLOCK_SIZE
    assert tokens_of(outputs) == tokens_of(outputs_of(engine_of(), one))


def test_reserved_blocks_are_released() -> None:
    target = decode_engine()
    incoming = target.hooks.get(KvImports).reserve("r", LONG, "")
    assert incoming is not None
    assert target.scheduler.tables.pool.num_free == 64 - 12
    target.hooks.get(KvImports).release(incoming)
    assert_nothing_held(target)
    one = request("r", LONG, **GREEDY)
    hand_off(prefill_engine(), target, one)
    target.add(one)
    target.cancel("r")  # before it was scheduled
    assert_nothing_held(target)


def test_reservations_leave_blocks_for_a_sequence_of_full_length() -> None:
    target = decode_engine(kv_tokens=512)  # 32 blocks, 16 of them for a sequence of 256
    first = target.hooks.get(KvImports).reserve("a", LONG, "")
    assert first is not None
    assert target.hooks.get(KvImports).reserve("b", LONG[::-1], "") is None
    whole = request("whole", LONG[5:] + LONG[:40], max_tokens=10, **GREEDY)
    target.add(whole)
    tokens = []
    while target.has_work:
        tokens += tokens_of(target.step(), "whole")
    assert len(tokens) == 10
    target.hooks.get(KvImports).release(first)
    assert target.hooks.get(KvImports).reserve("b", LONG[::-1], "") is not None


def test_nothing_is_reserved_for_short_or_cached_prompts() -> None:
    target = decode_engine()
    assert target.hooks.get(KvImports).reserve("r", LONG[:16], "") is None
    outputs_of(target, request("before", LONG, max_tokens=1))
    assert target.hooks.get(KvImports).reserve("r", LONG, "") is None
    assert target.hooks.get(KvImports).cached(LONG, "") == 192
    assert_nothing_held(target)


def test_a_preempted_export_has_the_same_bytes() -> None:
    source = prefill_engine(max_batched_tokens=40)
    plan = HandoffPlan(CacheLayout.of(source.runner), 0, 10, (0, 1), 64)
    expected = compute_export(prefill_engine(), LONG, plan)
    sink = CopySink(source)
    source.hooks.get(KvExports).begin("export", plan, sink)
    source.add(
        source.validate(Request("export", LONG[:160], SamplingParams(max_tokens=1), max_cached_tokens=plan.first_state))
    )
    for _ in range(3):
        source.step()
    source.scheduler._preempt(source.scheduler.running[0])
    source.add(request("between", LONG[::-1][:100], max_tokens=3))  # uses the freed blocks
    while source.has_work:
        source.step()
    source.hooks.get(KvExports).end("export")
    assert_nothing_held(source)
    for part in plan.parts():
        assert sink.bytes_of(plan, part) == expected.bytes_of(plan, part)


def test_parts_cover_all_blocks_and_states_once() -> None:
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
        with pytest.raises(ValueError, match=r"invalid block range|invalid state layers"):
            HandoffPlan(layout, **wrong)  # type: ignore[arg-type]
