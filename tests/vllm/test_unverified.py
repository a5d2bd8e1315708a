"""Drafts that are compared with the text and never verified."""

import numpy as np

from paceline.vllm.decisions import FIRST_STEPS, MORE_STEPS, UnverifiedDrafts, sample
from paceline.vllm.sequences import TrackedSequence


def sequence(number: int) -> TrackedSequence:
    one = TrackedSequence(number, 2)
    one.extend(np.array([1, 2], dtype=np.int32))
    return one


def test_drafts_are_compared_as_far_as_the_text_is_known() -> None:
    right, wrong, none, short = (sequence(i) for i in range(4))
    drafts = UnverifiedDrafts("m", 4)
    drafts.add([right, wrong, none, short], {0: (3, 4, 5, 6), 1: (3, 9, 5, 6), 3: (3,)})
    for one in (right, wrong, none, short):
        one.extend(np.array([3, 4], dtype=np.int32))
    seen = {one.sequence_id: (one.drafted, one.accepted) for one in drafts.compare()}
    assert seen == {0: (2, 2), 1: (4, 1), 2: (0, 0), 3: (1, 1)}
    assert drafts.compare() == ()
    assert right.record.tokens(4) > wrong.record.tokens(4) > none.record.tokens(4)


def test_comparisons_go_on_while_drafts_are_right() -> None:
    def num_steps(token: int) -> int:
        one, drafts, count = sequence(0), UnverifiedDrafts("m", 4), 0
        drafts.start()
        while drafts.is_waiting:
            drafts.add([one], {0: (token,)})
            one.extend(np.array([7], dtype=np.int32))
            drafts.compare()
            count += 1
        return count

    assert num_steps(7) == FIRST_STEPS + MORE_STEPS
    assert num_steps(8) == FIRST_STEPS


def test_the_last_of_the_first_drafts_is_compared_before_any_step_is_left_out() -> None:
    one, drafts = sequence(0), UnverifiedDrafts("m", 4)
    drafts.start()
    for _ in range(FIRST_STEPS):
        drafts.compare()
        drafts.add([one], {0: (7,)})
        one.extend(np.array([7], dtype=np.int32))
    assert drafts.is_waiting
    drafts.compare()
    assert drafts.is_waiting  # it was right, so that more steps are compared


def test_indexed_sequences_are_looked_up_first() -> None:
    batch = [sequence(i) for i in range(16)]
    batch[3].has_drafted = batch[5].has_drafted = True
    assert {one.id for one in sample(batch)} == {3, 5, 14, 15}
    assert len(sample(batch * 4)) == 8
    assert len(sample(batch[:2])) == 2
