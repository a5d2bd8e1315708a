"""Sequences are recognised by their tokens alone."""

import numpy as np

from paceline.vllm.sequences import KEPT_STEPS, SequenceTable


def rows(*texts):
    return [np.array(text, dtype=np.int32) for text in texts]


def test_a_sequence_is_opened_once_and_follows_its_row():
    table = SequenceTable(max_growth=5)
    first = table.match(rows([1, 2, 3, 9], [4, 5, 9]), [1, 1], step=1)
    assert [one.num_prompt for one in first.opened] == [3, 2]
    second = table.match(rows([1, 2, 3, 9, 8, 7], [4, 5, 9, 6]), [2, 1], step=2)
    assert second.rows == first.rows
    assert not second.opened
    assert second.rows[0].ids == [1, 2, 3, 9, 8, 7]


def test_tokens_of_steps_without_a_match_belong_to_sequences_that_end():
    table = SequenceTable(max_growth=5)
    ended, other = table.match(rows([1, 2, 9], [4, 5, 9]), [1, 1], step=1).rows
    table.append([[[3], [6]], [[4], [7]]])
    (row,) = table.match(rows([4, 5, 9, 6, 7, 8]), [1], step=4).rows
    assert row is other
    assert other.ids == [4, 5, 9, 6, 7, 8]
    assert ended.ids == [1, 2, 9, 3, 4]


def test_rows_may_change_places():
    table = SequenceTable(max_growth=5)
    a, b, c = table.match(rows([1, 1], [2, 2], [3, 3]), [1, 1, 1], step=1).rows
    moved = table.match(rows([3, 3, 0], [1, 1, 0]), [1, 1], step=2)
    assert moved.rows == [c, a]
    back = table.match(rows([3, 3, 0, 1], [1, 1, 0, 1], [2, 2, 0]), [1, 1, 1], step=3)
    assert back.rows == [c, a, b]


def test_a_sequence_without_a_row_ends_after_a_while():
    table = SequenceTable(max_growth=5)
    (gone,) = table.match(rows([1, 1]), [1], step=1).rows
    assert not table.match(rows([2, 2]), [1], step=1 + KEPT_STEPS).ended
    assert table.match(rows([2, 2, 2]), [1], step=2 + KEPT_STEPS).ended == [gone]
    assert len(table) == 1


def test_a_prompt_that_starts_with_an_old_text_is_another_sequence():
    table = SequenceTable(max_growth=5)
    (old,) = table.match(rows([1, 2, 3]), [1], step=1).rows
    (new,) = table.match(rows([1, 2, 3, *range(10, 30)]), [1], step=2).rows
    assert new is not old
    assert new.num_prompt == 22


def test_steps_without_a_call_allow_more_growth():
    table = SequenceTable(max_growth=1)
    (one,) = table.match(rows([1, 2]), [1], step=1).rows
    assert table.match(rows([1, 2, 3, 4, 5]), [1], step=4).rows == [one]


def test_of_two_equal_sequences_each_row_has_its_own():
    table = SequenceTable(max_growth=5)
    first = table.match(rows([1, 2], [1, 2]), [1, 1], step=1).rows
    assert first[0] is not first[1]
    second = table.match(rows([1, 2, 3], [1, 2, 4]), [1, 1], step=2).rows
    assert {one.id for one in second} == {one.id for one in first}
