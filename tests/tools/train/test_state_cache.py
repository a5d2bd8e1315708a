import pytest
import torch

from paceline.tools.train.target import Target
from paceline.tools.train.trainer import StateCache
from tests.tools.train.tiny import some_ids


@pytest.mark.parametrize("state_layers", [(), (1, 3)])
@pytest.mark.parametrize("max_bytes", [0, 1 << 30])
def test_states_match_the_target(state_layers: tuple[int, ...], max_bytes: int, target: Target) -> None:
    ids = some_ids(6, 10)
    cache = StateCache(target, ids, state_layers, max_bytes)
    assert cache.is_caching == (max_bytes > 0)
    for rows in ([0, 1, 2], [2, 3, 0], [3, 1, 2], [5, 4, 3]):  # new, half cached, cached, half cached
        found, wanted = cache.of(torch.tensor(rows)), target.states(ids[rows], state_layers)
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.last, wanted.last)
        assert (found.inner is None) == (wanted.inner is None)
        if found.inner is not None:
            torch.testing.assert_close(found.inner, wanted.inner)


def test_cached_row_needs_no_pass(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = StateCache(target, some_ids(4, 8), (2,), 1 << 30)
    cache.of(torch.tensor([0, 1, 2, 3]))
    monkeypatch.setattr(target, "states", None)
    cache.of(torch.tensor([3, 0]))
