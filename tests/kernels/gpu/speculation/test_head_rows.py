import torch

from paceline.kernels.gpu.speculation.head_rows import fresh_states, head_places, keep_fresh, place_fresh
from tests.kernels.gpu.cases import DEVICE


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_fresh_states_accumulate_until_they_are_placed():
    fresh = fresh_states(3, 4, 6, torch.float32, DEVICE)
    layers = [torch.arange(40.0, device=DEVICE).view(8, 5) + 100 * i for i in range(2)]  # wider than the stored part
    rows = torch.tensor([[0, 2], [4, 4], [6, 7]], device=DEVICE)
    tokens = torch.tensor([[9, 8], [7, -1], [6, 5]], device=DEVICE)
    for _ in range(2):
        keep_fresh(fresh, layers, rows, ints(1, 0, 1), tokens, ints(1, 1, 0))
    assert fresh.counts.tolist() == [4, 2, 0]
    assert fresh.tokens.tolist() == [[9, 8, 9, 8], [7, 7, 0, 0], [0] * 4]
    expected = torch.cat([layer[:, :3] for layer in layers], 1)
    assert torch.equal(fresh.states[0], expected[[0, 2, 0, 2]])
    assert torch.equal(fresh.states[1, :2], expected[[4, 4]])

    fresh.num_cached.copy_(ints(10, 3, 0))
    places = head_places(3, 4, 3, 2, DEVICE)
    place_fresh(ints(15, 20, 2), fresh, places, max_position=20)
    assert places.contexts.tolist() == [10, 3, 0]
    assert places.positions.view(3, 4)[:2].tolist() == [[10, 11, 12, 13], [17, 18, 19, 19]]
    assert places.last_rows.tolist() == [3, 5, 8]
    assert places.level_positions.tolist() == [[14, 14, 19, 19, 1, 1], [15, 15, 19, 19, 2, 2]]
    assert fresh.num_cached.tolist() == [14, 5, 0]
    assert fresh.counts.tolist() == [0, 0, 0]


def test_states_beyond_the_capacity_are_dropped():
    fresh = fresh_states(1, 2, 1, torch.float32, DEVICE)
    layer = torch.arange(3.0, device=DEVICE).view(3, 1)
    rows, tokens = torch.tensor([[0, 1, 2]], device=DEVICE), torch.tensor([[5, 6, 7]], device=DEVICE)
    keep_fresh(fresh, [layer], rows, ints(2), tokens, ints(1))
    assert fresh.counts.tolist() == [2]
    assert fresh.tokens.tolist() == [[5, 6]]
