"""The status of an engine, while it runs and from another thread."""

import threading
from dataclasses import replace

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.request import Request, SpeculationFlags
from paceline.core.status import BreakerState, EngineStatus
from paceline.engine.engine import Engine
from paceline.engine.traffic import BREAKER, DECLINED, NO_DRAFT, NO_ROOM
from paceline.policy.depth.breaker import Breaker, BreakerRule
from tests.fakes import TINY, FakeProposer, draft_model, random_chain, request, tiny_engine, tiny_model
from tests.traffic import traffic_class

MODEL = tiny_model()


def one(name: str = "r", category: str = "default", max_tokens: int = 24, **speculation: object) -> Request:
    return replace(request(name, (5, 11, 2, 30, 7), speculation, seed=3, max_tokens=max_tokens), category=category)


def finish(engine: Engine) -> EngineStatus:
    while engine.has_work:
        engine.step()
    return engine.status.snapshot()


def fallbacks(snapshot: EngineStatus) -> dict[str, int]:
    (report,) = snapshot.traffic
    return {reason: count for reason, count in report.fallbacks.items() if count}


def test_a_new_engine() -> None:
    assert tiny_engine(MODEL, random_chain(40), depth=3).status.snapshot() == EngineStatus(
        running=0,
        waiting=0,
        kv_used=0,
        kv_total=64,
        preemptions=0,
        invalid_drafts=0,
        flags=SpeculationFlags(enabled=True, method="fake", max_depth=32),
        traffic=(),
        seconds=dict.fromkeys(("draft", "network", "verify", "plain", "prompt"), 0.0),
    )


def test_running_waiting_and_blocks() -> None:
    engine = tiny_engine(MODEL, max_num_seqs=2)
    for i in range(5):
        engine.add(one(str(i)))
    assert (engine.status.snapshot().running, engine.status.snapshot().waiting) == (0, 5)
    engine.step()
    now = engine.status.snapshot()
    assert (now.running, now.waiting, now.kv_used) == (2, 3, 2)
    engine.cancel("0")
    assert (engine.status.snapshot().running, engine.status.snapshot().kv_used) == (1, 1)
    assert (finish(engine).kv_used, engine.status.snapshot().running) == (0, 0)


def test_preemptions_are_counted() -> None:
    engine = tiny_engine(MODEL, kv_tokens=64, prefix_caching=False)
    for i in range(4):
        engine.add(one(str(i), max_tokens=40))
    assert finish(engine).preemptions > 0


def test_alphas_of_a_perfect_draft_are_one() -> None:
    engine = tiny_engine(MODEL, draft_model(MODEL), depth=3)
    engine.add(one(category="code", max_tokens=40))
    (report,) = finish(engine).traffic
    assert (report.method, report.category, report.breaker) == ("fake", "code", BreakerState.CLOSED)
    assert report.alphas == (1.0, 1.0, 1.0)
    assert report.mean_depth == pytest.approx(3.0, abs=0.2)  # the last rounds are shorter
    assert not any(report.fallbacks.values())


def test_alphas_of_a_bad_draft_are_low_and_cover_tested_positions_only() -> None:
    engine = tiny_engine(
        MODEL, FakeProposer(lambda progress: ([39] * progress.depth, [*range(-1, progress.depth - 1)]))
    )
    engine.add(one(max_tokens=60))
    (report,) = finish(engine).traffic
    assert len(report.alphas) < 4
    assert report.alphas[0] < 0.2


def test_traffic_is_reported_by_category_and_categories_are_bounded() -> None:
    engine = tiny_engine(MODEL, draft_model(MODEL), depth=2)
    for i in range(40):
        engine.add(one(str(i), category=f"kind {i}", max_tokens=4))
    categories = [report.category for report in finish(engine).traffic]
    assert len(categories) == 33
    assert set(categories) == {f"kind {i}" for i in range(32)} | {"other"}


# --- fallbacks


def test_a_missing_draft() -> None:
    engine = tiny_engine(MODEL, FakeProposer(lambda progress: ([], [])), depth=3)
    engine.add(one(max_tokens=10))
    assert fallbacks(finish(engine)) == {NO_DRAFT: 8}  # no drafts for the first token and the last


def test_an_invalid_draft() -> None:
    engine = tiny_engine(MODEL, FakeProposer(lambda progress: ([TINY.vocab_size], [-1])), depth=3)
    engine.add(one(max_tokens=10))
    snapshot = finish(engine)
    assert (fallbacks(snapshot), snapshot.invalid_drafts) == ({NO_DRAFT: 8}, 8)


def test_a_policy_that_declines() -> None:
    engine = tiny_engine(MODEL, random_chain(40), depth=0)
    engine.add(one(max_tokens=10))
    snapshot = finish(engine)
    assert fallbacks(snapshot) == {DECLINED: 8}
    assert snapshot.traffic[0].mean_depth == 0.0


def test_no_room_for_drafts() -> None:
    engine = tiny_engine(MODEL, random_chain(40), depth=3, max_num_seqs=2, max_batched_tokens=2)
    for name in "ab":
        engine.add(one(name, max_tokens=10))
    assert fallbacks(finish(engine))[NO_ROOM] > 0


def test_an_open_breaker() -> None:
    breaker, clock = Breaker(BreakerRule(threshold=0.5, trips=1, window=1)), VirtualClock()
    engine = tiny_engine(MODEL, random_chain(40), depth=3, breaker=breaker, clock=clock)
    breaker.record(traffic_class("fake/default"), 3, 0, clock.now())
    engine.add(one(max_tokens=10))
    snapshot = finish(engine)
    assert fallbacks(snapshot) == {BREAKER: 8}
    assert snapshot.traffic[0].breaker is BreakerState.OPEN


def test_a_request_without_speculation_is_no_fallback() -> None:
    engine = tiny_engine(MODEL, random_chain(40), depth=3)
    engine.add(one("a", enabled=False))
    engine.add(one("b", max_depth=0))
    assert finish(engine).traffic == ()
    engine.flags.apply(SpeculationFlags(enabled=False))
    engine.add(one("c"))
    assert finish(engine).traffic == ()


# --- from another thread


def test_a_snapshot_may_be_taken_at_any_moment() -> None:
    engine = tiny_engine(MODEL, draft_model(tiny_model(perturb=0.2)), depth=3)
    done = threading.Event()
    taken: list[EngineStatus] = []
    failed: list[Exception] = []

    def watch() -> None:
        try:
            while not done.is_set():
                taken.append(engine.status.snapshot())
        except Exception as error:
            failed.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(24):
        engine.add(one(str(i), category=f"kind {i}", max_tokens=8))
    finish(engine)
    done.set()
    watcher.join()
    assert failed == []
    assert all(0 <= snapshot.kv_used <= snapshot.kv_total for snapshot in taken)
    assert len(engine.status.snapshot().traffic) == 24


def test_a_busy_engine_updates_its_traffic_report_periodically() -> None:
    clock = VirtualClock()
    engine = tiny_engine(MODEL, draft_model(MODEL), depth=1, clock=clock)
    engine.add(one(max_tokens=40))
    for _ in range(3):
        engine.step()
    assert engine.status.snapshot().traffic == ()
    clock.advance(0.25)
    engine.step()
    reported = engine.status.snapshot().traffic
    assert len(reported) == 1
    engine.step()
    assert engine.status.snapshot().traffic is reported
