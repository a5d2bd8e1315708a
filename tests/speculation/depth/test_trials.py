import pytest

from paceline.speculation.depth.trials import CONTESTED, LONGEST_HOLD, WINDOW_STEPS, Trials

BATCH = 64


def run(
    trials: Trials, windows: int, rates: dict[bool, float], joined_every: int = 8, advantage: float = 1.3
) -> list[bool]:
    """Run whole windows at `rates` of drafting and of plain decoding; returns which ran."""
    ways = []
    for _ in range(windows):
        ways.append(trials.allows_drafts(BATCH))
        for step in range(WINDOW_STEPS):
            num_joined = int(step % joined_every == 0) if joined_every else 0
            trials.observe(BATCH, BATCH, BATCH / rates[trials.allows_drafts(BATCH)], num_joined, num_joined, advantage)
    return ways


@pytest.mark.parametrize("drafting", [0.9, 1.1])
def test_the_faster_way_is_kept(drafting: float) -> None:
    ways = run(Trials(), 2000, {True: drafting, False: 1.0})
    kept = ways[100:].count(drafting > 1.0) / len(ways[100:])
    assert ways[:2] == [True, False]
    assert 0.98 < kept < 1.0  # the other way is tried again, but rarely


def test_a_changed_load_is_noticed() -> None:
    trials = Trials()
    run(trials, 400, {True: 0.9, False: 1.0})
    ways = run(trials, 3 * LONGEST_HOLD, {True: 1.2, False: 1.0})
    assert all(ways[-10:])


def test_without_prompts_the_costs_of_steps_decide() -> None:
    assert all(run(Trials(), 20, {True: 0.5, False: 1.0}, joined_every=0))


def test_the_first_prompts_of_a_batch_replace_no_sequence() -> None:
    trials = Trials()
    for _ in range(4 * WINDOW_STEPS):
        trials.observe(BATCH, BATCH, 1.0, 3, 0, 1.3)
    assert trials.allows_drafts(BATCH)


def test_after_a_pause_drafting_is_allowed_until_sequences_are_replaced_again() -> None:
    trials = Trials()
    run(trials, 20, {True: 0.8, False: 1.0}, joined_every=2)
    assert not trials.allows_drafts(BATCH)
    trials.restart()
    assert all(run(trials, 3, {True: 0.8, False: 1.0}, joined_every=0))
    assert run(trials, 3, {True: 0.8, False: 1.0}, joined_every=2) == [True, False, False]


@pytest.mark.parametrize("advantage", [CONTESTED, 3.0, 0.9])
def test_a_clear_case_is_not_tried(advantage: float) -> None:
    assert all(run(Trials(), 20, {True: 0.9, False: 1.0}, advantage=advantage))


def test_a_busy_server_decodes_plainly_and_rarely_tries_to_draft() -> None:
    ways = run(Trials(), 10 * LONGEST_HOLD, {True: 0.8, False: 1.0}, joined_every=2)
    assert ways[0]
    assert ways.count(True) < 12


def test_a_busy_server_drafts_if_that_proves_faster() -> None:
    ways = run(Trials(), 2 * LONGEST_HOLD, {True: 1.2, False: 1.0}, joined_every=2)
    assert all(ways[LONGEST_HOLD + 3 : LONGEST_HOLD + 9])


def test_scales_are_separate() -> None:
    trials = Trials()
    run(trials, 2, {True: 0.9, False: 1.0})
    assert not trials.allows_drafts(BATCH)
    assert trials.allows_drafts(BATCH // 2)
    assert not trials.allows_drafts(BATCH + 3)


def test_a_batch_between_two_scales_stays_in_the_last_one() -> None:
    trials = Trials()
    run(trials, 2, {True: 0.9, False: 1.0})
    assert trials.allows_drafts(BATCH * 2)
    assert trials.allows_drafts(int(BATCH * 1.45))
    assert trials.allows_drafts(int(BATCH * 1.45) - 1)
    assert not trials.allows_drafts(BATCH)
    assert not trials.allows_drafts(int(BATCH * 1.35))
