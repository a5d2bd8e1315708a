"""The proposer `pool` with a draft worker that runs when the test calls it."""

from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.clock import VirtualClock, WallClock
from paceline.core.request import SamplingParams
from paceline.drafting import proposer as inbox
from paceline.drafting.connection import AWAITED_PING_SECONDS, PING_SECONDS, DraftAddress
from paceline.drafting.scheduler import DraftLimits
from paceline.drafting.worker import DraftWorker
from paceline.policy.pairing.ahead import WINDOW
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import SequenceProgress
from paceline.wire.transport import wait_any
from tests.processes.pools import PASS_SECONDS, ScriptedCore, draft_worker, lockstep, never_lose_workers, pool

VOCAB = 1000


def progress(*ids: int, number: int = 7, depth: int = 3) -> SequenceProgress:
    return SequenceProgress(number, ids, depth, SamplingParams(temperature=0.0), 1, 0, 1, "coupled")


def test_network_cost_is_at_most_one_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, worker):
        pool, clock = proposer.inner, proposer.clock
        monkeypatch.setattr(inbox, "wait_any", answer_after(0.003, worker, clock))

        def drafted() -> DraftBatch:
            return pool.collect([7], clock.now() + 5.0)

        proposer.observe([progress(1, 2)])
        assert drafted().tokens.tolist() == [3, 4, 5]
        clock.advance(PING_SECONDS)
        pool.observe([progress(1, 2, 3, 9)])
        assert drafted().tokens.tolist() == [10, 11, 12]
        trip = pool.connections[0].round_trip.measured
        assert trip == pytest.approx(0.003 + PASS_SECONDS)
        before = pool.status().wait_seconds
        pool.observe([progress(1, 2, 3, 9, 10, 20)])
        batch = drafted()
        assert batch.tokens.tolist() == [21, 22, 23]
        assert batch.cost.network_seconds == trip < pool.status().wait_seconds - before


def answer_after(trip: float, worker: DraftWorker, clock: VirtualClock) -> Callable[[list[Any], float], list[Any]]:
    """A wait in which the worker runs once. It ends `trip` seconds after that."""

    def wait(connections: list[Any], seconds: float) -> list[Any]:
        worker.run_once(0.0)
        clock.advance(trip)
        return wait_any(connections, 0.0)

    return wait


def test_draft_that_has_arrived_costs_no_network_time() -> None:
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, _):
        for committed in range(3, 35, 4):
            proposer.observe([progress(*range(1, committed))])  # the worker drafts before this returns
            batch = proposer.collect([7], 0.0)
            assert batch.tokens.tolist() == [committed, committed + 1, committed + 2]
            assert batch.cost.network_seconds == 0.0


def test_worker_reports_that_it_paused_drafting_ahead() -> None:
    with lockstep(ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB), VOCAB) as (proposer, _):
        ids = [1]
        while proposer.inner.status().drafters[0].paused_share is None:
            assert len(ids) < 2 * WINDOW
            proposer.observe([progress(*ids)])
            assert proposer.collect([7], 0.0).tokens.tolist() == [(ids[-1] + i) % VOCAB for i in (1, 2, 3)]
            ids.append((ids[-1] + 500) % VOCAB)
        assert proposer.inner.status().drafters[0].paused_share == 0.0


def test_idle_target_measures_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured time does not include the time until the next look."""
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, worker):
        pool, clock = proposer.inner, proposer.clock
        monkeypatch.setattr(inbox, "wait_any", answer_after(0.003, worker, clock))
        proposer.observe([])
        assert pool.connections[0].round_trip.measured is None
        clock.advance(AWAITED_PING_SECONDS + PING_SECONDS)
        pool.maintain()
        clock.advance(1.0)
        pool.maintain()
        assert pool.connections[0].round_trip.measured == pytest.approx(0.003)


def test_draft_on_trial_gets_a_share_of_the_sequences_and_its_goodput_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_lose_workers(monkeypatch)
    right = ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB)
    wrong = ScriptedCore(lambda ids: (ids[-1] + 2) % VOCAB)
    with (
        draft_worker(right, VOCAB, DraftLimits(max_sequences=512), name="old") as old,
        draft_worker(wrong, VOCAB, DraftLimits(max_sequences=512), name="new") as new,
        pool(old, DraftAddress("new", new.address, is_on_trial=True), vocab_size=VOCAB) as proposer,
    ):
        numbers, ids = range(120), dict.fromkeys(range(120), (1, 2))
        for _ in range(6):  # each commits what its draft got right, and one token
            proposer.observe([progress(*ids[number], number=number) for number in numbers])
            drafted = proposer.collect(numbers, WallClock().now() + 5.0).split()
            for number in numbers:
                last = ids[number][-1]
                committed = [last + 1]
                for token in drafted[number].tokens if number in drafted else ():
                    if token != committed[-1]:
                        break
                    committed.append(token + 1)
                ids[number] += tuple(committed)
        trial = {number for number in numbers if proposer._pool_drafts.draws_trial(number)}
        assert 10 <= len(trial) <= 50
        by_name = {drafter.name: drafter.sequences for drafter in proposer.status().drafters}
        assert by_name == {"old": 120 - len(trial), "new": len(trial)}
        connections = proposer.connections
        proposer.set_workers([DraftAddress("old", old.address), DraftAddress("new", new.address)])
        assert proposer.connections == connections, "the end of a trial keeps the connections"
        proposer.close(list(numbers))
        sums = {drafter.name: drafter.goodput for drafter in proposer.status().drafters}
        assert {name: one.sequences for name, one in sums.items()} == by_name
        assert sums["new"].tokens / sums["new"].sequences == 5.0, "one token a round"
        assert sums["old"].tokens / sums["old"].sequences > 10.0
        assert sums["old"].seconds > 0.0
