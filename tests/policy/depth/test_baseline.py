"""Plain steps among drafting steps."""

from paceline.policy.depth.goodput import CLEAR_ADVANTAGE, EVERY, FIRST, MAX_MISSED, Baselines


def due(baselines: Baselines, batch: int, steps: int, advantage: float | None = None) -> list[int]:
    """Numbers of the drafting steps that are baselines instead. Each is observed before the next."""
    taken = []
    for step in range(1, steps + 1):
        if baselines.is_due(batch, True, advantage):
            baselines.observe_plain(batch, is_timed=True, is_loss=False)
            taken.append(step)
    return taken


def test_the_first_step_is_one_and_intervals_double() -> None:
    steps = due(Baselines(), 1, 2000)
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    assert gaps[:5] == [1, FIRST + 1, 2 * FIRST + 1, 4 * FIRST + 1, 8 * FIRST + 1]
    assert set(gaps[7:]) == {EVERY + 1}


def test_a_clear_advantage_makes_the_third_one_wait() -> None:
    baselines = Baselines()
    assert due(baselines, 1, 300, CLEAR_ADVANTAGE) == [1, FIRST + 2, FIRST + 2 + EVERY + 1]


def test_one_is_due_at_once_if_the_advantage_is_not_clear_any_more() -> None:
    baselines = Baselines()
    due(baselines, 1, 100, CLEAR_ADVANTAGE)
    assert due(baselines, 1, 1, CLEAR_ADVANTAGE - 0.1) == [1]


def test_a_clear_advantage_does_not_keep_a_loss_from_being_measured_again() -> None:
    baselines = Baselines()
    due(baselines, 1, 100, CLEAR_ADVANTAGE)
    baselines.observe_plain(1, is_timed=True, is_loss=True)
    assert due(baselines, 1, FIRST, CLEAR_ADVANTAGE) == [1]


def test_each_scale_of_batch_has_its_own() -> None:
    baselines = Baselines()
    due(baselines, 4, 2000)
    assert due(baselines, 256, 20) == due(Baselines(), 1, 20)
    assert due(baselines, 7, 20) == []  # the same scale as 4


def test_any_plain_step_counts_as_one() -> None:
    baselines = Baselines()
    baselines.observe_plain(1, is_timed=True, is_loss=False)
    assert due(baselines, 1, FIRST) == []
    assert baselines.num_drafted(1) == FIRST
    baselines.observe_plain(1, is_timed=True, is_loss=False)
    assert baselines.num_drafted(1) == 0
    assert due(baselines, 1, FIRST) == []


def test_a_baseline_by_which_drafting_loses_is_repeated_at_once() -> None:
    baselines = Baselines()
    assert due(baselines, 1, 3) == [1]
    baselines.observe_plain(1, is_timed=True, is_loss=True)
    assert due(baselines, 1, FIRST) == [1]


def test_an_untimed_baseline_is_repeated_a_few_times() -> None:
    baselines, taken = Baselines(), 0
    while baselines.is_due(1, would_draft=True):
        baselines.observe_plain(1, is_timed=False, is_loss=False)
        taken += 1
    assert taken == 1 + MAX_MISSED


def test_a_batch_does_not_start_to_draft_before_the_baseline_is_observed() -> None:
    """Steps may be decided before it is observed."""
    baselines = Baselines()
    assert all(baselines.is_due(8, would_draft=True) for _ in range(3))
    baselines.observe_plain(8, is_timed=True, is_loss=False)
    steps = [baselines.is_due(8, would_draft=True) for _ in range(FIRST + 3)]
    assert steps == [*[False] * FIRST, True, False, False]  # a drafting batch continues after a baseline


def test_a_much_larger_batch_waits_too() -> None:
    baselines = Baselines()
    due(baselines, 4, 3)
    assert all(baselines.is_due(256, would_draft=True) for _ in range(3))


def test_a_step_that_would_not_draft_ends_drafting() -> None:
    baselines = Baselines()
    due(baselines, 8, 3)
    assert not baselines.is_due(8, would_draft=False)
    baselines.observe_plain(8, is_timed=True, is_loss=True)
    assert all(baselines.is_due(8, would_draft=True) for _ in range(3))
