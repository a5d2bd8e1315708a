import pytest
import torch

from paceline.train.data.kept_states import KeptStates
from paceline.train.drafts.target import Target
from tests.train.tiny import some_ids


@pytest.mark.parametrize("capture", [(), (1, 3)])
@pytest.mark.parametrize("room", [0, 1 << 30])
def test_states_are_the_targets_own(capture: tuple[int, ...], room: int, target: Target) -> None:
    ids = some_ids(6, 10)
    kept = KeptStates(target, ids, capture, room)
    assert kept.keeps == (room > 0)
    for rows in ([0, 1, 2], [2, 3, 0], [3, 1, 2], [5, 4, 3]):  # new, half known, known, half known
        found, wanted = kept.of(torch.tensor(rows)), target.states(ids[rows], capture)
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.last, wanted.last)
        assert (found.inner is None) == (wanted.inner is None)
        if found.inner is not None:
            torch.testing.assert_close(found.inner, wanted.inner)


def test_a_row_that_comes_again_costs_no_pass(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptStates(target, some_ids(4, 8), (2,), 1 << 30)
    kept.of(torch.tensor([0, 1, 2, 3]))
    monkeypatch.setattr(target, "states", None)
    kept.of(torch.tensor([3, 0]))
