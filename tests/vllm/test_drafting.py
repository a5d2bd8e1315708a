"""The loop that drafts for vLLM, against a small model of vLLM's batch."""

import numpy as np
import pytest

from paceline.core.clock import VirtualClock
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.rules import FixedDepth
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import ProposerTraits
from paceline.vllm.decisions import LookupTime
from paceline.vllm.drafting import DraftLoop
from paceline.vllm.proposers import Lookups, depth_policy
from paceline.vllm.sequences import Batch

LONGEST = 256
TIMES = LookupTime(per_sequence=20e-6, per_token=1e-6)


class FakeVllm:
    """Verifies greedily: the text of every sequence is known beforehand."""

    def __init__(
        self, loop: DraftLoop, clock: VirtualClock, texts, num_prompt: int, row_seconds: float = 0.001
    ) -> None:
        self.loop, self.clock, self.row_seconds = loop, clock, row_seconds
        self.texts = texts
        self.lengths = [num_prompt] * len(texts)
        self.drafts = [[] for _ in texts]
        self.num_steps = 0

    def step(self) -> None:
        sampled = []
        for i, (text, draft) in enumerate(zip(self.texts, self.drafts, strict=True)):
            start = self.lengths[i]
            accepted = 0
            while accepted < len(draft) and draft[accepted] == text[start + accepted]:
                accepted += 1
            tokens = text[start : start + accepted + 1]
            self.lengths[i] += len(tokens)
            sampled.append(tokens)
        rows = sum(1 + len(draft) for draft in self.drafts)
        self.clock.advance(0.010 + self.row_seconds * rows)
        ids = np.zeros((len(self.texts), LONGEST), dtype=np.int32)
        for i, text in enumerate(self.texts):
            ids[i, : self.lengths[i]] = text[: self.lengths[i]]
        self.drafts = self.loop.propose(Batch(sampled, np.array(self.lengths, dtype=np.int32), ids))
        self.num_steps += 1
        assert len(self.drafts) == len(self.texts)


def make(method, depth, clock, max_depth=4):
    lookups = Lookups.of(method)
    return DraftLoop("plugin", lookups.proposer({}, clock), depth, max_depth, 1000, clock, TIMES, lookups.keep)


@pytest.mark.parametrize("method", ["suffix", "ngram", "combined"])
def test_a_text_that_repeats_takes_fewer_steps(method):
    clock = VirtualClock()
    texts = [[10 * i + j % 7 for j in range(LONGEST)] for i in range(1, 5)]
    loop = make(method, FixedDepth(4), clock)
    vllm = FakeVllm(loop, clock, texts, num_prompt=8)
    while min(vllm.lengths) < 150:
        vllm.step()
    assert vllm.num_steps < 50
    assert 0.7 * loop.num_drafted < loop.num_accepted <= loop.num_drafted


def test_goodput_stops_where_drafts_lose_and_drafts_where_they_pay():
    generator = np.random.default_rng(0)
    clock = VirtualClock()
    noise = [generator.integers(0, 30, 4096).tolist() for _ in range(4)]
    losing = make("ngram", depth_policy("goodput", 4, TIMES), clock)
    vllm = FakeVllm(losing, clock, noise, num_prompt=8, row_seconds=0.010)
    while min(vllm.lengths) < 240:
        vllm.step()
    assert losing.num_drafted < 0.25 * vllm.num_steps * 4

    repeats = [[(10 * i + j % 7) for j in range(LONGEST)] for i in range(1, 5)]
    paying = make("ngram", GoodputDepth(4), clock)
    vllm = FakeVllm(paying, clock, repeats, num_prompt=8, row_seconds=0.0001)
    while min(vllm.lengths) < 240:
        vllm.step()
    assert vllm.num_steps < 120


def test_a_few_lookups_come_before_the_prompts_of_a_batch_are_indexed():
    """Drafts of four sequences are compared with their texts; then all 32 draft."""
    clock, lookups = VirtualClock(), Lookups.of("suffix")
    proposer, observed = lookups.proposer({}, clock), []
    observe = proposer.observe
    proposer.observe = lambda batch: (observed.append({one.sequence_id for one in batch}), observe(batch))
    loop = DraftLoop("plugin", proposer, FixedDepth(4), 4, 1000, clock, TIMES, lookups.keep)
    texts = [[10 * i + j % 7 for j in range(LONGEST)] for i in range(1, 33)]
    vllm = FakeVllm(loop, clock, texts, num_prompt=16)
    vllm.step()
    assert not any(vllm.drafts)
    assert len(observed[0]) == 4
    vllm.step()
    assert all(vllm.drafts)


def test_a_proposer_that_fails_costs_drafts_only():
    class Broken:
        traits = ProposerTraits()

        def observe(self, batch):
            raise RuntimeError("broken")

        def collect(self, sequence_ids, deadline):
            raise RuntimeError("broken")

        def close(self, sequence_ids):
            raise RuntimeError("broken")

    clock = VirtualClock()
    loop = DraftLoop("plugin", Broken(), FixedDepth(4), 4, 1000, clock, TIMES)
    vllm = FakeVllm(loop, clock, [list(range(LONGEST))], num_prompt=3)
    for _ in range(20):
        vllm.step()
    assert vllm.lengths == [23]


def test_a_draft_is_cut_to_its_depth_the_vocabulary_and_the_row():
    class Constant:
        traits = ProposerTraits()

        def observe(self, batch):
            self.batch = batch

        def collect(self, sequence_ids, deadline):
            return DraftBatch.chains([(one.sequence_id, [1, 2, 5000, 3]) for one in self.batch])

        def close(self, sequence_ids):
            pass

    clock = VirtualClock()
    ids = np.ones((1, 16), dtype=np.int32)
    loop = DraftLoop("plugin", Constant(), FixedDepth(4), 4, 1000, clock, TIMES)
    assert loop.propose(Batch([[9]], np.array([5], dtype=np.int32), ids)) == [[1, 2]]
    assert loop.propose(Batch([[1]], np.array([14], dtype=np.int32), ids)) == [[1]]
    assert loop.propose(Batch([[1]], np.array([16], dtype=np.int32), ids)) == [[]]


def test_a_row_whose_prompt_is_not_complete_gets_no_draft():
    clock = VirtualClock()
    loop = make("ngram", FixedDepth(4), clock)
    ids = np.tile(np.array([1, 2, 3, 4], dtype=np.int32), (2, 4))
    drafts = loop.propose(Batch([[], [4]], np.array([8, 8], dtype=np.int32), ids))
    assert drafts[0] == []
    assert drafts[1] == [1, 2, 3, 4]


class Silent:
    """A policy that never drafts, and takes `cost` seconds to say so."""

    def __init__(self, clock, cost):
        self.clock, self.cost, self.num_observed = clock, cost, 0

    def observe(self, step):
        assert step.batch == step.rows
        self.num_observed += 1

    def skip_step(self, batch):
        self.clock.advance(self.cost)
        return True

    def decide(self, batch):
        raise AssertionError("a policy that skips decides nothing")


def test_decisions_take_a_small_share_of_the_time_while_nothing_is_drafted():
    clock = VirtualClock()
    policy = Silent(clock, cost=0.0005)
    loop = make("ngram", policy, clock)
    vllm = FakeVllm(loop, clock, [list(range(LONGEST))], num_prompt=3, row_seconds=0.0)
    for _ in range(200):
        vllm.step()
    assert vllm.lengths == [203]
    assert 0.15 * 200 < policy.num_observed < 0.3 * 200  # 0.5 ms are 1% of five steps of 10 ms
    assert policy.num_observed * policy.cost < 0.015 * 200 * 0.010


def test_a_sequence_that_starts_during_a_pause_is_noticed():
    clock = VirtualClock()
    policy = Silent(clock, cost=0.002)
    loop = make("ngram", policy, clock)
    first = FakeVllm(loop, clock, [list(range(LONGEST))], num_prompt=3)
    for _ in range(10):
        first.step()
    loop.depth = FixedDepth(4)  # the pause has many steps left
    repeating = FakeVllm(loop, clock, [[j % 7 for j in range(LONGEST)]] * 2, num_prompt=30)
    repeating.step()
    assert [len(draft) for draft in repeating.drafts] == [4, 4]
