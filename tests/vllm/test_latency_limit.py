"""Drafts must pay for three of four sequences."""

from paceline.vllm.decisions import FORGET_CALLS, MIN_DRAFTING, LatencyLimit
from paceline.vllm.sequences import DraftRecord


def record(accepted: int, rounds: int = 4) -> DraftRecord:
    made = DraftRecord()
    for _ in range(rounds):
        made.add(4, accepted)
    return made


def limit(ratio: float, batch: int = 8) -> LatencyLimit:
    made = LatencyLimit(max_depth=4)
    for _ in range(4):
        made.observe(batch, False, 0.010)
        made.observe(batch, True, 0.010 * ratio)
    return made


def test_a_few_good_sequences_do_not_slow_the_others_down() -> None:
    assert not limit(1.5).allows([record(4)] * 5 + [record(0)] * 3, 4)
    assert limit(1.5).allows([record(4)] * 6 + [record(0)] * 2, 4)
    assert not limit(10.0).allows([record(4)] * 8, 4)


def test_sequences_without_a_record_count_as_poor_until_enough_are_known() -> None:
    new = [DraftRecord()] * 5
    assert not limit(1.5).allows([record(4)] * 3 + new, 4)
    assert limit(1.5).allows([record(4)] * 4 + new[:4], 4)


def test_the_policy_decides_alone_for_few_sequences_and_while_costs_are_unknown() -> None:
    assert limit(5.0, batch=3).allows([record(0)] * 3, 3)
    assert LatencyLimit(4).allows([record(0)] * 8, 4)
    assert limit(5.0).allows([record(0)] * 32, 4)  # another scale


def test_drafts_stop_after_a_few_steps_if_they_are_wrong() -> None:
    one = limit(1.5)
    assert one.allows([record(4)] * 8, 4)
    assert [one.allows([record(0)] * 8, 4) for _ in range(6)].count(True) == MIN_DRAFTING - 1


def test_the_cost_of_drafts_is_measured_again_after_many_refusals() -> None:
    one = limit(1.5)
    assert [one.allows([record(0)] * 8, 4) for _ in range(FORGET_CALLS)].count(True) == 0
    assert one.allows([record(0)] * 8, 4)
