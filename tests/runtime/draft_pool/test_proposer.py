"""The pool proposer with a draft worker that works when the test says so."""

from typing import Any

import pytest

from paceline.cluster.pairing.ahead import WINDOW
from paceline.core.clock import WallClock
from paceline.core.sampling import SamplingParams
from paceline.runtime.draft_pool import proposer as pool_proposer
from paceline.runtime.draft_pool.connection import DraftAddress
from paceline.runtime.wire.transport import wait_any
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress
from tests.runtime.pools import ScriptedCore, lockstep

VOCAB = 1000


def progress(*ids: int, number: int = 7, depth: int = 3) -> Progress:
    return Progress(number, ids, depth, SamplingParams(temperature=0.0), 1, 0, 1, "coupled")


def test_a_wait_is_the_networks_up_to_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, worker):
        pool = proposer.inner

        def work_meanwhile(lines: Any, seconds: float) -> Any:
            worker.turn(0.05)
            return wait_any(lines, min(seconds, 0.05))

        monkeypatch.setattr(pool_proposer, "wait_any", work_meanwhile)

        def drafted() -> DraftBatch:
            return pool.collect([7], WallClock().now() + 5.0)

        pool.observe([progress(1, 2)])
        assert drafted().tokens.tolist() == [3, 4, 5]
        trip = pool.snapshot().links[0].round_trip
        assert trip is not None
        before = pool.snapshot().wait_seconds
        pool.observe([progress(1, 2, 3, 9)])
        batch = drafted()
        assert batch.tokens.tolist() == [10, 11, 12]
        waited = pool.snapshot().wait_seconds - before
        assert 0.0 < batch.cost.network_seconds <= waited
        assert batch.cost.network_seconds <= max(trip, pool.snapshot().links[0].round_trip or 0.0)


def test_what_was_there_when_it_was_wanted_cost_no_network() -> None:
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, _):
        link, costs = proposer.inner._links["draft-0"], []
        for committed in range(3, 35, 4):
            proposer.observe([progress(*range(1, committed))])  # the worker drafts before this returns
            assert link.line.wait(5.0)  # for its first message; on a busy machine the draft may be the second
            batch = proposer.collect([7], 0.0)
            assert batch.tokens.tolist() == [committed, committed + 1, committed + 2]
            costs.append(batch.cost.network_seconds)
        assert min(costs) == 0.0


def test_a_draft_worker_that_stops_drafting_ahead_says_so_and_answers_on_demand() -> None:
    with lockstep(ScriptedCore(lambda ids: (ids[-1] + 1) % VOCAB), VOCAB) as (proposer, _):
        ids = [1]
        while proposer.inner.snapshot().links[0].resting is None:
            assert len(ids) < 2 * WINDOW
            proposer.observe([progress(*ids)])
            assert proposer.collect([7], 0.0).tokens.tolist() == [(ids[-1] + i) % VOCAB for i in (1, 2, 3)]
            ids.append((ids[-1] + 500) % VOCAB)
        assert proposer.inner.snapshot().links[0].resting == 0.0


def test_workers_that_are_named_no_more_are_let_go() -> None:
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, worker):
        pool = proposer.inner
        proposer.observe([progress(1, 2)])
        kept = pool._links["draft-0"]
        assert pool.snapshot().links[0].sequences == 1
        pool.set_workers([DraftAddress("draft-0", worker.address), DraftAddress("draft-1", "tcp://127.0.0.1:9")])
        assert pool._links["draft-0"] is kept
        assert pool.snapshot().links[0].sequences == 1
        pool.set_workers([])
        assert pool.snapshot().links == ()
        for _ in range(100):
            worker.turn(0.05)
            if not worker.snapshot().peers:
                break
        assert worker.snapshot().peers == 0, "it was told goodbye"
        pool.observe([progress(1, 2, 3)])
        assert len(pool.collect([7], 0.0).tokens) == 0


def test_an_idle_target_knows_how_far_its_draft_workers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not how long it takes until it looks again."""
    with lockstep(ScriptedCore(lambda ids: ids[-1] + 1), VOCAB) as (proposer, worker):
        pool, link = proposer.inner, proposer.inner._links["draft-0"]

        def work_meanwhile(lines: Any, seconds: float) -> Any:
            worker.turn(0.05)
            return wait_any(lines, 0.05)

        monkeypatch.setattr(pool_proposer, "wait_any", work_meanwhile)
        monkeypatch.setattr(link, "is_unwatched", lambda now: link._asked_at is not None)
        for _ in range(100):  # an answer that is there before anybody watches is none to measure by
            link._ping_at = 0.0
            pool.tend()
            if pool.snapshot().links[0].round_trip is not None:
                break
        assert pool.snapshot().links[0].round_trip is not None
