"""Stages of a full memory."""

from paceline.policy.overload import OverloadPolicy, OverloadRules, OverloadStage

NORMAL, LARGE, NEW, DROP = OverloadStage


def stages(policy: OverloadPolicy, *readings: tuple[int, float]) -> list[OverloadStage]:
    return [policy.observe(used, now).stage for used, now in readings]


def test_a_stage_begins_with_the_first_reading_that_reaches_its_share() -> None:
    policy = OverloadPolicy(100)
    assert stages(policy, (79, 0.0), (80, 0.1), (90, 0.2), (95, 0.3)) == [NORMAL, LARGE, NEW, DROP]
    assert stages(OverloadPolicy(100), (200, 0.0)) == [DROP]


def test_stages_end_one_after_the_other_when_less_was_used_for_a_while() -> None:
    policy = OverloadPolicy(100, OverloadRules(calm_seconds=2.0))
    policy.observe(99, 0.0)
    assert stages(policy, (10, 1.0), (10, 2.9), (10, 3.0), (10, 4.9), (10, 5.0), (10, 7.0)) == [
        *(DROP, DROP, NEW, NEW, LARGE, NORMAL),
    ]


def test_a_reading_within_the_gap_keeps_a_stage() -> None:
    policy = OverloadPolicy(100)
    policy.observe(81, 0.0)
    assert stages(policy, (76, 10.0), (74, 20.0), (76, 21.0), (74, 22.0), (74, 23.9), (74, 24.0)) == [
        *(LARGE, LARGE, LARGE, LARGE, LARGE, NORMAL),
    ]


def test_a_stage_that_is_reached_again_counts_from_there() -> None:
    policy = OverloadPolicy(100)
    policy.observe(91, 0.0)
    assert stages(policy, (10, 1.0), (91, 2.9), (10, 3.0), (10, 4.9), (10, 5.0)) == [NEW, NEW, NEW, NEW, LARGE]


def test_only_changes_are_reported() -> None:
    policy = OverloadPolicy(100)
    changes = [
        policy.observe(used, now).has_changed for used, now in ((50, 0.0), (85, 1.0), (85, 2.0), (10, 3.0), (10, 5.0))
    ]
    assert changes == [False, True, False, False, True]


def test_requests_are_dropped_one_a_second_while_the_last_stage_is_reached() -> None:
    policy = OverloadPolicy(100)
    drops = [policy.observe(used, now).drops for used, now in ((96, 0.0), (96, 0.5), (96, 1.0), (93, 2.0), (96, 2.1))]
    assert drops == [True, False, True, False, True]
