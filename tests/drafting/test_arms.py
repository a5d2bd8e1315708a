"""A draft on trial and the one in use are measured and learned of apart."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from paceline.core.clock import WallClock
from paceline.core.traffic import TrafficClass
from paceline.drafting.connection import DraftAddress
from paceline.drafting.control import PoolControl
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.trial import PoolDrafts, TrialChange
from paceline.engine.loop import EngineLoop
from paceline.policy.depth.observation import DepthCandidate, StepObservation
from paceline.policy.depth.rules import FixedDepth
from paceline.policy.pairing.draft_trial import TrialLimits
from paceline.wire.gateway_messages import WorkerAddress
from tests.drafting.test_proposer import VOCAB, progress
from tests.fakes import request, run, tiny_engine, tiny_model
from tests.processes.pools import (
    PatientProposer,
    ScriptedCore,
    draft_worker,
    model_core,
    never_lose_workers,
    pool,
    wait_ready,
)
from tests.traffic import CHAT

NUMBERS = range(120)


@pytest.fixture(autouse=True)
def _workers_are_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    never_lose_workers(monkeypatch)


@contextmanager
def trial_pool() -> Iterator[tuple[PoolProposer, DraftAddress, DraftAddress]]:
    """A pool whose old draft is always wrong and whose new one is always right, and their addresses."""
    wrong, right = ScriptedCore(lambda ids: (ids[-1] + 2) % VOCAB), ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    with (
        draft_worker(wrong, VOCAB, DraftLimits(max_sequences=512), name="old") as old,
        draft_worker(right, VOCAB, DraftLimits(max_sequences=512), name="new") as new,
        pool(old, tried := DraftAddress("new", new.address, is_on_trial=True), vocab_size=VOCAB) as proposer,
    ):
        yield proposer, DraftAddress("old", old.address), tried


def decode(proposer: PoolProposer, depths: dict[int, int], rounds: int = 6) -> None:
    """The text counts upwards. Every sequence commits what its draft got right, and one token."""
    ids = dict.fromkeys(depths, (1, 2))
    for _ in range(rounds):
        proposer.observe([progress(*ids[number], number=number, depth=depth) for number, depth in depths.items()])
        wanted = [number for number, depth in depths.items() if depth]
        drafted = proposer.collect(wanted, WallClock().now() + 5.0).split()
        for number in depths:
            committed = [ids[number][-1] + 1]
            for token in drafted[number].tokens if number in drafted else ():
                if token != committed[-1]:
                    break
                committed.append(token + 1)
            ids[number] += tuple(committed)


def test_sequences_without_drafts_count_for_the_draft_that_does_not_pay() -> None:
    with trial_pool() as (proposer, _, _):
        tried = {number for number in NUMBERS if proposer._pool_drafts.draws_trial(number)}
        decode(proposer, {number: 3 if number in tried else 0 for number in NUMBERS})
        proposer.close(list(NUMBERS))
        sums = {drafter.name: drafter.goodput for drafter in proposer.status().drafters}
        assert {name: one.sequences for name, one in sums.items()} == {"old": 120 - len(tried), "new": len(tried)}
        assert sums["old"].tokens / sums["old"].sequences == 5.0, "plain decoding: one token a round"
        assert sums["new"].tokens / sums["new"].sequences > 10.0


def test_short_sequences_count() -> None:
    """A good draft ends a text in few rounds: without these sequences it would seem worse than it is."""
    with trial_pool() as (proposer, _, _):
        decode(proposer, dict.fromkeys(NUMBERS, 3), rounds=2)
        proposer.close(list(NUMBERS))
        assert sum(drafter.goodput.sequences for drafter in proposer.status().drafters) == len(NUMBERS)


def test_request_that_allows_no_drafts_is_not_measured() -> None:
    with trial_pool() as (proposer, _, _):
        ids: tuple[int, ...] = (1, 2)
        for _ in range(6):
            proposer.observe([replace(progress(*ids, depth=0), allows_drafts=False)])
            ids += (ids[-1] + 1,)
        proposer.close([7])
        assert all(drafter.goodput.sequences == 0 for drafter in proposer.status().drafters)


def test_gain_of_one_draft_does_not_decide_for_the_other() -> None:
    with trial_pool() as (proposer, old, new):
        decode(proposer, dict.fromkeys(NUMBERS, 3))
        current, candidate = proposer._pool_drafts.current.statistics, proposer._pool_drafts.candidate.statistics
        assert current.gain <= 1.0
        assert candidate.gain > 2.0
        assert proposer.set_workers([DraftAddress("new", new.address)]) is TrialChange.KEPT
        assert proposer._pool_drafts.current.statistics is candidate
        assert old.name not in {one.where.name for one in proposer.connections}


def test_traffic_class_of_a_sequence_is_that_of_its_draft() -> None:
    with trial_pool() as (proposer, old, new):
        refine = proposer.traits.traffic_class
        assert refine is not None
        for number in NUMBERS:  # also before the first step
            assert refine(CHAT, number) == CHAT._replace(on_trial=proposer._pool_drafts.draws_trial(number))
        proposer.set_workers([old])
        assert {refine(CHAT, number) for number in NUMBERS} == {CHAT}
        assert proposer.set_workers([old, new]) is TrialChange.BEGUN
        assert proposer.set_workers([old]) is TrialChange.ROLLED_BACK


def test_equal_lists_are_no_change() -> None:
    assert PoolDrafts().set_connections([]) is TrialChange.NONE


class DeclinesPoorDrafts(FixedDepth):
    """Stops drafting for a traffic class that accepts little, as the rule `goodput` does where drafts do not pay."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._rounds: defaultdict[TrafficClass, list[bool]] = defaultdict(list)

    def observe(self, step: StepObservation) -> None:
        for one in step.rounds:
            if one.drafted:
                self._rounds[one.traffic].append(one.accepted > 0)

    def decide(self, batch: Sequence[DepthCandidate]) -> list[int]:
        poor = {name for name, hits in self._rounds.items() if len(hits) >= 32 and sum(hits) < 0.5 * len(hits)}
        depths = super().decide(batch)
        return [0 if one.traffic in poor else depth for one, depth in zip(batch, depths, strict=True)]


def test_draft_that_is_not_used_does_not_stop_the_new_one() -> None:
    target = tiny_model()
    vocab = target.config.vocab_size
    with (
        draft_worker(model_core(tiny_model(seed=5)), vocab, name="old") as old,
        draft_worker(model_core(tiny_model()), vocab, name="new") as new,
        pool(old, vocab_size=vocab) as proposer,
    ):
        engine = tiny_engine(target, PatientProposer(proposer), DeclinesPoorDrafts(3), max_num_seqs=16)
        asked = [request(f"{i}", [1, 2, 3, 4 + i % 8], max_tokens=24, ignore_eos=True) for i in range(176)]
        run(engine, [engine.validate(one) for one in asked[:16]])
        proposer.set_workers([DraftAddress("old", old.address), DraftAddress("new", new.address, is_on_trial=True)])
        wait_ready(proposer, 2)
        before = {drafter.name: drafter.goodput for drafter in proposer.status().drafters}
        run(engine, [engine.validate(one) for one in asked[16:]])
        sums = {drafter.name: drafter.goodput.since(before[drafter.name]) for drafter in proposer.status().drafters}
        assert min(one.sequences for one in sums.values()) >= TrialLimits().min_sequences
        assert sum(one.sequences for one in sums.values()) == 160
        assert sums["new"].tokens / sums["new"].sequences >= 20
        answers = {drafter.name: drafter.answers for drafter in proposer.status().drafters}
        assert answers["new"] > answers["old"], "every round of its sequences"


def test_acceptance_is_learned_apart_and_stays_with_a_draft_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model()
    vocab = target.config.vocab_size
    with (
        draft_worker(model_core(tiny_model(seed=5)), vocab, name="old") as old,
        draft_worker(model_core(tiny_model()), vocab, name="new") as new,
        pool(old, new, vocab_size=vocab) as proposer,
    ):
        engine = tiny_engine(target, PatientProposer(proposer), max_num_seqs=16)
        loop, restarted = EngineLoop(engine), dict[TrafficClass, float]()
        monkeypatch.setattr(engine.speculator.depth, "restart", restarted.__setitem__)
        try:
            control, first = PoolControl(proposer, loop), WorkerAddress("old", old.address)
            control.set_workers([first, WorkerAddress("new", new.address)])
            control.set_workers([first, WorkerAddress("new", new.address, is_on_trial=True)])
            asked = [engine.validate(request(f"{i}", [1, 2, 3, 4 + i % 8], max_tokens=16)) for i in range(48)]
            loop.run(lambda: run(engine, asked))
            alphas = engine.speculator.traffic.first_alphas()
            (known,) = [traffic for traffic in alphas if not traffic.on_trial]
            assert alphas[known] < 0.5 < alphas[known._replace(on_trial=True)]
            control.set_workers([WorkerAddress("new", new.address)])
            loop.run(lambda: None)
            assert restarted == {known: alphas[known._replace(on_trial=True)]}
        finally:
            loop.close()
