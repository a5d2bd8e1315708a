"""Acceptance of trees on the device against `speculation/verification/verification.py`."""

import pytest
import torch

from paceline.kernels.gpu.speculation.accept import DeviceState
from paceline.kernels.gpu.speculation.accept_tree import accept_trees, path_buffers
from paceline.speculation.drafts.drafts import Draft, depths
from paceline.speculation.verification.verification import walk
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (12, 7), (6, 31)])
def test_equals_the_host(batch: int, nodes: int) -> None:
    g = generator(nodes)
    parents = [
        [int(torch.randint(-1, node, (), generator=g)) if node else -1 for node in range(nodes)] for _ in range(batch)
    ]
    drafts = torch.randint(0, 3, (batch, nodes), generator=g)  # of equal siblings the first counts
    picks = torch.randint(0, 3, (batch, nodes + 1), generator=g)
    limits = torch.randint(0, nodes + 1, (batch,), generator=g, dtype=torch.int32)
    limits[0] = nodes
    active = (torch.rand(batch, generator=g) < 0.8).to(torch.int32)
    active[0] = 1
    lengths = torch.randint(2, 100, (batch,), generator=g, dtype=torch.int32)
    last = torch.randint(100, 200, (batch, 2), generator=g)
    levels = max(max(depths(tree)) for tree in parents)

    state = DeviceState(lengths.to(DEVICE, copy=True), last.to(DEVICE, copy=True))
    out = path_buffers(batch, levels, DEVICE)
    for tensor in (out.counts, out.is_bonus, out.tokens, out.rows):
        tensor.fill_(-9)
    above = torch.tensor(parents, dtype=torch.int32, device=DEVICE)
    given = [tensor.to(DEVICE) for tensor in (picks, limits, active)]
    accept_trees(drafts.to(DEVICE), above, *given, state, out)
    most = 0
    for b in range(batch):
        first = b * (nodes + 1)
        committed: list[int] = []
        path: list[int] = []
        if active[b]:
            limit = int(limits[b])
            draft = Draft(tuple(drafts[b, :limit].tolist()), tuple(parents[b][:limit]))
            path, following = walk(draft, picks[b].tolist())
            committed = [*(draft.tokens[node] for node in path), following]
            assert bool(out.is_bonus[b]) == ((path[-1] if path else -1) not in draft.parents)
        most = max(most, len(path))
        assert int(out.counts[b]) == len(path)
        assert out.tokens[b].tolist() == committed + [-1] * (levels + 1 - len(committed))
        rows = [first, *(first + 1 + node for node in path)]
        assert out.rows[b].tolist() == rows + rows[-1:] * (levels + 1 - len(rows))
        assert int(state.lengths[b]) == int(lengths[b]) + len(committed)
        assert state.last[b].tolist() == [*last[b].tolist(), *committed][-2:]
    assert most > 0 or nodes == 1
