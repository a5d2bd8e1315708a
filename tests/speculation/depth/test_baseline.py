"""Plain steps among those that draft."""

from paceline.speculation.depth.baseline import EVERY, FIRST, MISSED, Baselines


def due(baselines: Baselines, batch: int, steps: int) -> list[int]:
    """Of so many steps that draft, those that are plain instead."""
    return [step for step in range(1, steps + 1) if baselines.is_due(batch)]


def test_first_of_all_then_soon_and_seldom_later() -> None:
    steps = due(Baselines(), 1, 2000)
    gaps = [after - before for before, after in zip([0, *steps], steps, strict=False)]
    assert gaps[:5] == [1, FIRST + 1, 2 * FIRST + 1, 4 * FIRST + 1, 8 * FIRST + 1]
    assert set(gaps[7:]) == {EVERY + 1}


def test_each_scale_of_a_batch_has_its_own() -> None:
    baselines = Baselines()
    due(baselines, 4, 2000)
    assert due(baselines, 256, 20) == due(Baselines(), 1, 20)
    assert due(baselines, 7, 20) == []  # of one scale with 4


def test_a_plain_step_serves_as_one() -> None:
    baselines = Baselines()
    baselines.timed(1)
    assert due(baselines, 1, FIRST) == []
    assert baselines.drafted(1) == FIRST
    baselines.timed(1)
    assert baselines.drafted(1) == 0
    assert due(baselines, 1, FIRST) == []


def test_one_is_repeated_at_once_when_asked() -> None:
    baselines = Baselines()
    assert due(baselines, 1, 3) == [1]
    baselines.timed(1)
    baselines.repeat(1)
    assert due(baselines, 1, FIRST) == [1]


def test_one_that_told_no_time_is_taken_again_but_not_for_ever() -> None:
    baselines, taken = Baselines(), 0
    while baselines.is_due(1):
        baselines.missed(1)
        taken += 1
    assert taken == 1 + MISSED
