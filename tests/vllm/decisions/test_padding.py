"""Padded drafts, by measured step times."""

import numpy as np
import pytest

from paceline.vllm.batch import Batch
from paceline.vllm.decisions.padding import RETRY_STEPS, TRIALS, PaddedDrafts, Padding


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


def test_a_small_gain_is_not_enough() -> None:
    assert not trained(0.00598, 0.006).decide(8)


def test_steps_without_drafts_are_measured_apart_from_those_with_some() -> None:
    drafts, tokens = PaddedDrafts(4, lambda: True), np.zeros((2, 4096), dtype=np.int32)
    length = 10
    for draft in ([[7], []], [[], []]) * (2 * TRIALS):
        batch = Batch([[1], [1]], np.array([length, length], dtype=np.int32), tokens)
        returned = drafts.apply(batch, draft)
        is_padded = returned != draft
        seconds = (0.004 if is_padded else 0.009) if any(draft) else (0.008 if is_padded else 0.005)
        length += 1
        after = Batch([[1], [1]], np.array([length, length], dtype=np.int32), tokens)
        drafts.observe(after, np.array([length - 1, length - 1]), seconds)
    batch = Batch([[1], [1]], np.array([length, length], dtype=np.int32), tokens)
    assert drafts.apply(batch, [[7], []]) == [[7, 1, 1, 1], [1, 1, 1, 1]]
    assert drafts.apply(batch, [[], []]) == [[], []]


def test_nothing_is_padded_if_every_step_has_a_complete_graph() -> None:
    drafts, tokens = PaddedDrafts(4, lambda: False), np.zeros((2, 4096), dtype=np.int32)
    batch = Batch([[1], [1]], np.array([10, 10], dtype=np.int32), tokens)
    assert [drafts.apply(batch, [[7], []]) for _ in range(2 * TRIALS)] == [[[7], []]] * (2 * TRIALS)
    assert drafts.repeat(batch, [[], []]) == [[], []]
