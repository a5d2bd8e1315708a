"""The recorder, with a virtual clock that advances in chosen parts of a round."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.core.clock import VirtualClock
from paceline.engine import host
from paceline.engine.engine import Engine
from paceline.models.runner.runner import Span
from paceline.tools.footprint.memory_reads import REPEATS, copy_bandwidth, draft_parts, pass_bytes
from paceline.tools.profile.recorder import Outcome, Recorder
from tests.engine.harness import GREEDY, MODEL, PROMPT, engine_of, oracle, oracle_tree, plain_tokens, request
from tests.fakes import StepClock, draft_model, tiny_engine, tiny_model

TEXT = plain_tokens(max_tokens=9, **GREEDY)


def slow(work: Callable[..., Any], seconds: float, clock: VirtualClock) -> Callable[..., Any]:
    def slowed(*arguments: Any, **options: Any) -> Any:
        clock.advance(seconds)
        return work(*arguments, **options)

    return slowed


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, VirtualClock]:
    """Drafting takes 2 + 0.5 s, the pass 5, verdicts 1."""
    clock = VirtualClock()
    engine = engine_of(oracle(TEXT, wrong=[4]), 3, clock=clock)
    (proposer,) = engine.speculator.proposers.values()
    monkeypatch.setattr(proposer, "collect", slow(proposer.collect, 2.0, clock))
    monkeypatch.setattr(proposer, "observe", slow(proposer.observe, 0.5, clock))
    monkeypatch.setattr(engine.runner, "forward", slow(engine.runner.forward, 5.0, clock))
    monkeypatch.setattr(host, "verify_picks", slow(host.verify_picks, 1.0, clock))
    return engine, clock


def drive(engine: Engine, clock: VirtualClock | None = None, between: float = 0.0) -> None:
    engine.add(request("r", PROMPT, max_tokens=9, **GREEDY))
    while engine.has_work:
        engine.step()
        if clock is not None and engine.has_work:
            clock.advance(between)


def test_parts_add_up_to_the_round(timed: tuple[Engine, VirtualClock]) -> None:
    engine, clock = timed
    recorder = Recorder(clock)
    with engine.hooks.listening(recorder):
        recorder.label = "speculative"
        drive(engine, clock, between=0.25)
    prompt, first, *_, last = recorder.rounds
    assert not prompt.is_decode
    assert (prompt.times.verify, prompt.times.draft) == (5.0, 0.5)
    assert first.is_decode
    assert first.label == "speculative"
    times = first.times
    assert (times.draft, times.verify, times.sample, times.gap, times.total) == (2.5, 5.0, 1.0, 0.25, 8.75)
    assert last.times.gap == 0.0  # nothing follows it


def test_drafted_and_accepted_are_recorded(timed: tuple[Engine, VirtualClock]) -> None:
    engine, clock = timed
    recorder = Recorder(clock)
    with engine.hooks.listening(recorder):
        recorder.label = "x"
        drive(engine)
    _, first, second, *_ = recorder.rounds
    assert first.outcomes == (
        Outcome(requested=3, levels=3, nodes=3, accepted=3),
    )  # tokens 1 to 3, then 4 as the bonus
    assert second.outcomes[0].accepted == 3
    assert (first.batch, first.rows, first.requested) == (1, 4, 3)


def test_tree_levels_and_nodes_differ() -> None:
    engine = engine_of(oracle_tree(TEXT), 4)
    recorder = Recorder(engine.clock)
    with engine.hooks.listening(recorder):
        recorder.label = "x"
        drive(engine)
    assert recorder.rounds[1].outcomes == (Outcome(requested=4, levels=2, nodes=4, accepted=2),)


def test_nothing_is_recorded_without_a_label_or_hook() -> None:
    engine = engine_of(oracle(TEXT), 3)
    recorder = Recorder(engine.clock)
    with engine.hooks.listening(recorder):
        drive(engine)
    assert recorder.rounds == []
    recorder.label = "x"
    drive(engine)
    assert recorder.rounds == []


def test_bytes_count_every_level_of_target_and_draft() -> None:
    draft = tiny_model(seed=0)
    engine = tiny_engine(MODEL, draft_model(draft), 2, clock=StepClock())
    recorder = Recorder(engine.clock)
    with engine.hooks.listening(recorder):
        recorder.label = "x"
        drive(engine)
    (runner,) = draft_parts(engine).runners
    # Five tokens of prompt and their pick are committed. The target reads 5 + 3 rows, the draft 6 and then 7.
    assert recorder.rounds[1].outcomes == (Outcome(2, 2, 2, 2),)
    passes = [pass_bytes(runner, [Span([0], context, [0], 1)]) for context in (5, 6)]
    assert recorder.rounds[1].times.bytes_read == sum(passes) + pass_bytes(engine.runner, [Span([0], 7, [0], 1)])


def test_bandwidth_counts_reading_and_writing() -> None:
    assert copy_bandwidth(torch.device("cpu"), StepClock(), 1 << 20) == pytest.approx(2 * (1 << 20) / 0.001)
    assert REPEATS > 1
