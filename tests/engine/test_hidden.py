"""What a proposer hears of the target's hidden states: those of the committed tokens, position by position."""

import torch

from paceline.core.request import SpeculationFlags
from paceline.speculation.proposer import HiddenRequest, ProposerTraits
from tests.exactness.suite import mixed_requests
from tests.fakes import TINY, MixedDepth, random_tree, run, tiny_engine, tiny_model
from tests.models.reference_heads import target_states


class Listener:
    """Drafts random trees and keeps all it hears."""

    def __init__(self, hidden=HiddenRequest((0, 2), last=True)):  # noqa: B008  # frozen
        self.traits = ProposerTraits(hidden)
        self.heard = {}
        self._inner = random_tree(8)
        self.collect, self.close = self._inner.collect, self._inner.close

    def observe(self, batch):
        self._inner.observe(batch)
        for progress in batch:
            self.heard.setdefault(progress.sequence_id, []).append((progress.hidden, progress.ids, progress.depth))


def check(model, listener):
    """Every state is what one pass over the whole text gives; returns how many there were."""
    count = 0
    for records in listener.heard.values():
        ids = records[-1][1]
        inner, last = target_states(model, ids, (0, 2))
        position = None
        for hidden, _, _ in records:
            if hidden is None:
                continue
            assert position is None or hidden.start >= position or hidden.start % 16 == 0  # after a preemption
            position = hidden.end
            part = slice(hidden.start, hidden.end)
            assert set(hidden.by_layer) == set(listener.traits.hidden.layers)
            for layer in listener.traits.hidden.layers:
                assert torch.equal(hidden.by_layer[layer], inner[layer][part])
            assert torch.equal(hidden.last, last[part])
            count += hidden.end - hidden.start
    return count


def test_trees_chunks_prefix_hits_and_preemptions():
    model, listener = tiny_model(), Listener()
    engine = tiny_engine(
        model, listener, MixedDepth(12), kv_tokens=16 * 14, max_model_len=160, max_batched_tokens=40, max_num_seqs=6
    )
    result = run(engine, mixed_requests(12, TINY.vocab_size, seed=2, max_tokens=60), arrivals=1)
    assert result.accepted > 0
    assert engine.scheduler.num_preemptions > 0
    assert check(model, listener) > 500


def test_prompts_are_heard_chunk_by_chunk_with_depth_0():
    model, listener = tiny_model(), Listener()
    engine = tiny_engine(model, listener, depth=3, max_batched_tokens=8)
    requests = mixed_requests(1, TINY.vocab_size, seed=4)
    run(engine, requests)
    ((*records,),) = listener.heard.values()
    prompt = len(requests[0].prompt_ids)
    chunks = [(hidden.start, hidden.end, depth) for hidden, _, depth in records if hidden.start < prompt]
    assert [start for start, _, _ in chunks] == list(range(0, prompt, 8))
    assert all(depth == 0 for _, end, depth in chunks if end < prompt)
    assert check(model, listener) > 0


def test_only_requested_states_are_kept():
    model, passes = tiny_model(), []

    def watched(proposer):
        engine = tiny_engine(model, proposer, depth=2)
        forward = engine.runner.forward
        engine.runner.forward = lambda *arguments: passes.append(arguments[1:3]) or forward(*arguments)
        return engine

    requests = mixed_requests(2, TINY.vocab_size)
    run(watched(random_tree(8)), requests)
    assert set(passes) == {((), False)}
    passes.clear()
    run(watched(Listener(HiddenRequest((1,)))), mixed_requests(2, TINY.vocab_size, enabled=False))
    assert set(passes) == {((), False)}
    engine = watched(Listener(HiddenRequest((1,))))
    engine.flags.apply(SpeculationFlags(enabled=False))
    passes.clear()
    run(engine, requests)
    assert set(passes) == {((), False)}
    engine.flags.apply(SpeculationFlags(enabled=True))
    passes.clear()
    run(engine, mixed_requests(2, TINY.vocab_size, seed=9))
    assert set(passes) == {((1,), False)}
