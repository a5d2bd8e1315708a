"""Acceptance of chains on the device against `speculation/verification/verification.py`."""

import pytest
import torch

from paceline.kernels.gpu.speculation.accept import DeviceState, accept_chains, accepted_buffers
from paceline.speculation.drafts.drafts import Draft
from paceline.speculation.verification.verification import walk
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE


@pytest.mark.parametrize(("batch", "depth"), [(1, 1), (5, 3), (40, 7), (16, 4), (3, 0)])
def test_equals_the_host(batch: int, depth: int) -> None:
    g = generator(batch)
    picks = torch.randint(0, 50, (batch, depth + 1), generator=g)
    wrong = torch.rand(batch, depth, generator=g) < 0.3
    drafts = torch.where(wrong, 99, picks[:, :depth])
    limits = torch.randint(0, depth + 1, (batch,), generator=g, dtype=torch.int32)
    active = torch.rand(batch, generator=g) < 0.8
    lengths = torch.randint(2, 100, (batch,), generator=g, dtype=torch.int32)
    last = torch.randint(100, 200, (batch, 2), generator=g)

    state = DeviceState(lengths.to(DEVICE).clone(), last.to(DEVICE).clone())
    out = accepted_buffers(batch, depth, DEVICE)
    out.counts.fill_(-9)
    out.tokens.fill_(-9)
    returned = accept_chains(drafts.to(DEVICE), picks.to(DEVICE), limits.to(DEVICE), active.to(DEVICE), state, out)
    assert returned is out
    for b in range(batch):
        if not active[b]:
            committed: list[int] = []
            assert int(out.counts[b]) == 0
        else:
            tokens = tuple(drafts[b, : limits[b]].tolist())
            path, following = walk(Draft(tokens, tuple(range(-1, len(tokens) - 1))), picks[b].tolist())
            committed = [*(tokens[node] for node in path), following]
            assert int(out.counts[b]) == len(path)
        assert out.tokens[b].tolist() == committed + [-1] * (depth + 1 - len(committed))
        assert int(state.lengths[b]) == int(lengths[b]) + len(committed)
        assert state.last[b].tolist() == [*last[b].tolist(), *committed][-2:]


def test_all_and_none_accepted() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3]], device=DEVICE)
    picks = torch.tensor([[1, 2, 3, 4], [9, 2, 3, 4]], device=DEVICE)
    full = torch.full((2,), 3, dtype=torch.int32, device=DEVICE)
    state = DeviceState(full.clone(), torch.tensor([[5, 6], [5, 6]], device=DEVICE))
    out = accept_chains(drafts, picks, full, torch.ones(2, dtype=torch.bool, device=DEVICE), state)
    assert out.counts.tolist() == [3, 0]
    assert out.tokens.tolist() == [[1, 2, 3, 4], [9, -1, -1, -1]]
    assert state.lengths.tolist() == [7, 4]
    assert state.last.tolist() == [[3, 4], [6, 9]]
