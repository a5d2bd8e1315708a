"""What it takes a sequence's draft to read what was written without it, against how long the sequence has left."""

import pytest

from paceline.speculation.depth.policy import Candidate, DraftingObservation, RoundObservation, StepObservation
from paceline.speculation.depth.start_costs import HORIZON, DraftPrefillCost


def step(*drafted: int, read: tuple[int, float] = (0, 0.0), method: str = "draft") -> StepObservation:
    """These sequences had drafts."""
    rounds = tuple(RoundObservation(i, f"{method}/chat", 1, 0, 1) for i in drafted)
    drafting = (DraftingObservation(method, 1, 0.001, *read),) if drafted else ()
    return StepObservation(8, 8 + len(drafted), 0, drafting, 0.01, 0.0, rounds)


def after(*steps: StepObservation) -> DraftPrefillCost:
    lag = DraftPrefillCost()
    for one in steps:
        lag.observe(one)
    return lag


def candidate(
    number: int, num_tokens: int = 300, remaining: int | None = None, category: str = "draft/chat"
) -> Candidate:
    return Candidate(number, category, 8, num_tokens, remaining)


READ = step(0, read=(1000, 0.01))  # 10 microseconds a token


def test_nobody_knows_at_first_and_it_costs_nothing() -> None:
    assert DraftPrefillCost().seconds(candidate(1)) == 0.0


def test_a_new_sequence_reads_all_that_it_has() -> None:
    assert after(READ).seconds(candidate(1, 300)) == pytest.approx(300 * 1e-5)
    assert after(READ).seconds(candidate(1, 600)) == pytest.approx(600 * 1e-5)


def test_one_that_soon_ends_has_few_steps_to_make_up_for_it() -> None:
    long, short = candidate(1, 300), candidate(2, 300, remaining=10)
    lag, each = after(READ), 300 * 1e-5
    assert lag.unprofitable([long, short], [1, 1], 1.01 * each / 10) == set()
    assert lag.unprofitable([long, short], [1, 1], 0.99 * each / 10) == {1}
    assert lag.unprofitable([long, short], [1, 1], 0.99 * each / HORIZON) == {0, 1}
    assert lag.unprofitable([long, short], [1, 0], 0.99 * each / HORIZON) == {0}
    assert lag.unprofitable([candidate(3, 300, remaining=0)], [1], 1.01 * each) == set()


@pytest.mark.parametrize("steps", [0, 3, 8, 20])
def test_nobody_is_late_who_drafts(steps: int) -> None:
    lag = after(READ, *[step()] * steps)
    assert lag.unprofitable([candidate(0), candidate(1)], [1, 1], 1e-9) == ({1} if steps <= 8 else {0, 1})
    assert DraftPrefillCost().unprofitable([candidate(0)], [1], 1e-9) == set()


def test_one_that_drafts_has_nothing_to_read() -> None:
    assert after(READ).seconds(candidate(0)) == 0.0
    assert after(READ, *[step()] * 8).seconds(candidate(0)) == 0.0


def test_one_that_has_not_drafted_for_a_while_reads_what_it_missed() -> None:
    assert after(READ, *[step()] * 20).seconds(candidate(0, 300)) == pytest.approx(20 * 1e-5)
    assert after(READ, *[step()] * 20).seconds(candidate(0, 5)) == pytest.approx(5 * 1e-5)


def test_reading_that_becomes_dearer_is_believed() -> None:
    lag = after(READ, *[step(0, read=(1000, 0.03))] * 20)
    assert lag.seconds(candidate(1, 300)) == pytest.approx(300 * 3e-5, rel=0.01)


def test_methods_are_told_apart() -> None:
    assert after(READ).seconds(candidate(1, category="ngram/chat")) == 0.0
    assert after(READ, step(0, method="ngram")).seconds(candidate(1)) > 0.0


def test_sequences_that_ended_are_forgotten() -> None:
    lag = after(*(step(i) for i in range(10_000)))
    assert len(lag._last) < 8192


def test_one_slow_reading_keeps_nobody_off_for_long() -> None:
    expected = pytest.approx(300 * 1e-5, rel=0.4)
    compiled_first = after(step(0, read=(1000, 3.0)), READ)
    assert compiled_first.seconds(candidate(1, 300)) == expected
    in_between = after(*[READ] * 8, step(0, read=(1000, 3.0)))
    assert in_between.seconds(candidate(1, 300)) < 2 * 300 * 1e-5
    paused = after(*[READ] * 8, step(0, read=(1000, 3.0)), *[READ] * 4)
    assert paused.seconds(candidate(1, 300)) == expected
