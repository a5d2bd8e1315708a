"""Padded drafts, by measured step times."""

import pytest

from paceline.vllm.padding import RETRY_STEPS, TRIALS, Padding


def trained(padded: float, other: float, batch: int = 8) -> Padding:
    padding = Padding()
    for _ in range(2 * TRIALS):
        is_padded = padding.decide(batch)
        padding.observe(batch, is_padded, padded if is_padded else other)
    return padding


@pytest.mark.parametrize(("padded", "other", "expected"), [(0.004, 0.006, True), (0.006, 0.004, False)])
def test_the_faster_kind_is_preferred_after_both_were_tried(padded: float, other: float, expected: bool) -> None:
    padding = trained(padded, other)
    assert [padding.decide(8) for _ in range(20)] == [expected] * 20


def test_each_scale_of_a_batch_learns_alone() -> None:
    padding = trained(0.004, 0.006)
    for _ in range(2 * TRIALS):
        is_padded = padding.decide(100)
        padding.observe(100, is_padded, 0.009 if is_padded else 0.005)
    assert padding.decide(8)
    assert not padding.decide(100)


def test_the_other_kind_is_tried_again_now_and_then() -> None:
    padding = trained(0.004, 0.006)
    assert [padding.decide(8) for _ in range(RETRY_STEPS)].count(False) == 1
