"""Trees grown on the device against trees grown on the host from the same levels."""

import pytest
import torch

from paceline.kernels.gpu.speculation.growth import Candidates, candidate_buffers, choose_nodes, grow_level
from paceline.kernels.gpu.speculation.ranking import RankedTokens
from paceline.speculation.proposers.eagle.eagle_trees import Level, choose
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE

TREES = 3


@pytest.mark.parametrize(("levels", "width", "branches", "nodes"), [(1, 2, 3, 2), (3, 4, 4, 7), (3, 3, 5, 20)])
def test_equals_the_host(levels, width, branches, nodes):
    g = generator(nodes)
    candidates, beams = candidate_buffers(TREES, levels, width, branches, DEVICE)
    host: list[Level] = []
    values = torch.zeros(TREES, 1)
    rows = torch.zeros(TREES, 1, dtype=torch.int64)
    for level in range(levels):
        parents = width if level else 1
        tokens = torch.randint(0, 99, (TREES, parents, branches), generator=g)
        confidence = -torch.randint(0, 4, (TREES, parents, branches), generator=g).float()  # many are equal
        children = RankedTokens(tokens.view(-1, branches).to(DEVICE), confidence.view(-1, branches).to(DEVICE))
        grow_level(children, level, beams[level % 2], candidates, beams[(level + 1) % 2])
        host.append(Level(tokens, confidence, rows))
        values = (values.unsqueeze(2) + confidence).flatten(1)
        best = values.sort(dim=1, descending=True, stable=True)
        values, rows = best.values[:, :width], best.indices[:, :width]
        after = beams[(level + 1) % 2]
        assert after.values.tolist() == values.tolist()
        assert after.tokens.view(TREES, width).tolist() == tokens.flatten(1).gather(1, rows).tolist()
        first = torch.arange(TREES).unsqueeze(1) * parents
        assert after.rows.view(TREES, width).tolist() == (first + rows // branches).tolist()

    drafted = torch.full((TREES, nodes), -7, device=DEVICE)
    parents = torch.full((TREES, nodes), -7, dtype=torch.int32, device=DEVICE)
    choose_nodes(candidates, drafted, parents)
    for tree, growth in enumerate(choose(host, [nodes] * TREES, [None] * TREES)):
        draft = growth.draft()
        assert (tuple(drafted[tree].tolist()), tuple(parents[tree].tolist())) == (draft.tokens, draft.parents)


def test_beams_have_the_bits_of_their_ancestors():
    _, beams = candidates, (first, second) = candidate_buffers(1, 3, 2, 2, DEVICE)
    tokens = torch.arange(4, device=DEVICE).view(2, 2)
    grow_level(RankedTokens(tokens[:1], torch.tensor([[-1.0, 0.0]], device=DEVICE)), 0, first, candidates, second)
    assert second.lineage.tolist() == [[0b01, 0b10]]
    assert second.candidates.tolist() == [[1, 0]]
    best = torch.tensor([[-3.0, -3.0], [-0.5, 0.0]], device=DEVICE)
    grow_level(RankedTokens(tokens, best), 1, second, candidates, first)
    assert first.lineage.tolist() == [[0b0110, 0b1010]]  # the second beam's children, the better one first
    assert first.rows.tolist() == [1, 1]
    assert len(beams) == 2


def test_impossible_nodes_come_last():
    values = torch.tensor([[-torch.inf, -1.0, -torch.inf, -2.0]], device=DEVICE)
    tokens = torch.tensor([[5, 6, 7, 8]], device=DEVICE)
    parents = torch.tensor([[-1, -1, 0, 1]], dtype=torch.int32, device=DEVICE)
    chosen, above = torch.zeros(1, 4, dtype=torch.int64, device=DEVICE), torch.zeros_like(parents)
    choose_nodes(Candidates(tokens, values, parents), chosen, above)
    assert chosen.tolist() == [[6, 8, 5, 7]]
    assert above.tolist() == [[-1, 0, -1, 2]]
