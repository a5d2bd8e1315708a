import torch

from paceline.models.decoder.decoder import HiddenStates
from paceline.speculation.proposer import HiddenRows
from paceline.speculation.proposers.eagle.eagle_cache import MAX_VIEWS, SMALL_STEP, PendingStates


def states(start, rows):
    values = torch.arange(start, start + rows).float().unsqueeze(1)
    return HiddenRows(start, {3: values}, values)


def held(pending, sequence_id):
    return [(part.start, part.end) for part in pending.parts(sequence_id)]


def test_parts_are_in_order_and_forgotten_after_use():
    pending = PendingStates()
    pending.add(1, states(0, 5), keep=True)
    pending.add(1, states(5, 2), keep=False)
    assert held(pending, 1) == [(0, 5), (5, 7)]
    assert pending.end(1) == 7
    pending.forget_before(1, 5)
    assert held(pending, 1) == [(5, 7)]
    pending.close(1)
    pending.close(1)
    assert pending.end(1) == 0
    assert pending.num_rows == 0


def test_a_sequence_keeps_its_newest_states():
    pending = PendingStates(max_rows=100, sequence_rows=6)
    pending.add(1, states(0, 4), keep=True)
    pending.add(1, states(4, 3), keep=True)
    assert held(pending, 1) == [(4, 7)]
    pending.add(2, states(0, 10), keep=True)
    (part,) = pending.parts(2)
    assert (part.start, part.end) == (4, 10)
    assert part.by_layer[3].squeeze(1).tolist() == [4, 5, 6, 7, 8, 9]
    assert part.last is not None
    assert len(part.last) == 6


def test_above_the_bound_the_largest_sequence_forgets():
    pending = PendingStates(max_rows=10, sequence_rows=8)
    pending.add(1, states(0, 3), keep=True)
    pending.add(1, states(3, 4), keep=True)
    pending.add(2, states(0, 5), keep=True)
    assert pending.num_rows <= 10
    assert held(pending, 1) == [(3, 7)]
    assert held(pending, 2) == [(0, 5)]


def test_kept_states_are_copied():
    whole = torch.zeros(1000, 1)
    pending = PendingStates()
    pending.add(1, HiddenRows(0, {0: whole[3:5]}, None), keep=True)
    (part,) = pending.parts(1)
    assert part.by_layer[0].untyped_storage().nbytes() == 8


def step_states(position, row, rows):
    """States of one row of a step of several."""
    values = torch.arange(rows).float().reshape(1, rows, 1) + 100 * position
    return HiddenRows(position, HiddenStates(values, (3,), range(row, row + 1)), None)


def test_states_of_small_steps_are_copied_together():
    pending = PendingStates()
    for position in range(MAX_VIEWS - 1):
        pending.add(1, step_states(position, 2, 8), keep=True)
    assert len(pending.parts(1)) == MAX_VIEWS - 1
    pending.add(1, step_states(MAX_VIEWS - 1, 2, 8), keep=True)
    (part,) = pending.parts(1)
    assert (part.start, part.end) == (0, MAX_VIEWS)
    assert part.by_layer[3].flatten().tolist() == [100.0 * position + 2 for position in range(MAX_VIEWS)]
    assert part.by_layer[3].untyped_storage().nbytes() == 4 * MAX_VIEWS
    assert pending.num_rows == MAX_VIEWS


def test_states_are_not_joined_across_a_gap():
    pending = PendingStates()
    for position in range(MAX_VIEWS):
        pending.add(1, step_states(position if position < 5 else position + 3, 0, 2), keep=True)
    assert held(pending, 1) == [*((i, i + 1) for i in range(5)), (8, MAX_VIEWS + 3)]


def test_a_row_of_a_large_step_is_copied_at_once():
    pending = PendingStates()
    pending.add(1, step_states(0, 3, SMALL_STEP + 1), keep=True)
    (part,) = pending.parts(1)
    assert part.by_layer[3].untyped_storage().nbytes() == 4
    whole = step_states(1, 0, 1)
    pending.add(1, whole, keep=True)
    assert pending.parts(1)[-1] is whole  # the only row of its step
