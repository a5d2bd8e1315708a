import pytest
import torch

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.gpu.speculation.tree_rows import CacheAddresses, move_paths, place_trees, tree_places
from paceline.speculation.drafts.drafts import depths
from paceline.speculation.verification.tree import ancestors
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE

TREES = [[-1, 0, 1, -1, 0, 3, 1], [-1, -1, -1, -1, -1, -1, -1], [-1, 0, 1, 2, 3, 4, 5]]
LENGTHS, LIMITS = [2, 20, 30], [7, 0, 3]


def tables(width: int) -> torch.Tensor:
    return torch.randperm(len(TREES) * width, generator=generator(1)).view(-1, width).to(torch.int32).to(DEVICE)


def test_slots_positions_and_ancestors_of_nodes():
    blocks = tables(4)
    levels = torch.full((3,), -7, dtype=torch.int32, device=DEVICE)
    places = tree_places(3, 7, levels)
    lengths, limits, parents = (torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in (LENGTHS, LIMITS, TREES))
    place_trees(lengths, parents, limits, 7, blocks[:, :3], places, max_position=34)
    assert places.contexts.tolist() == [length - 1 for length in LENGTHS]
    assert levels.tolist() == [max([0, *depths(tree)[:limit]]) for tree, limit in zip(TREES, LIMITS, strict=True)]
    assert places.ancestors.view(3, 8).tolist() == [ancestors(tree) for tree in TREES]
    for tree, (parents_here, length) in enumerate(zip(TREES, LENGTHS, strict=True)):
        positions = [min(length - 1 + depth, 33) for depth in (0, *depths(parents_here))]
        assert places.positions.view(3, 8)[tree].tolist() == positions
        slots = [
            int(blocks[tree, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in range(length - 1, length + 7)
        ]
        assert places.slots.view(3, 8)[tree].tolist() == slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_an_accepted_path_becomes_contiguous(dtype):
    # the second path overlaps itself: rows 2, 3 move to 1, 2; the third does not move
    paths = [[0, 1, 3, 6], [0, 2, 3, 5], [0, 1, 2, 3]]
    counts, contexts = [2, 3, 3], [3, 13, 15]
    blocks = tables(2)
    drawn = torch.randn(3, 2, 6 * BLOCK_SIZE, 4, generator=generator(2))
    cache = [tuple(part.to(dtype).to(DEVICE).view(6, BLOCK_SIZE, 1, 4) for part in layer) for layer in drawn]
    before = [[part.float().view(-1, 4).clone() for part in layer] for layer in cache]
    rows = torch.tensor([[7 * tree + row for row in path] for tree, path in enumerate(paths)], device=DEVICE)
    given = [torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (contexts, counts)]
    move_paths(CacheAddresses(cache), given[0], blocks, rows, given[1], 7)
    for layer, old in zip(cache, before, strict=True):
        for part, expected in zip(layer, old, strict=True):
            source = expected.clone()
            for tree, path in enumerate(paths):
                slots = [
                    int(blocks[tree, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE
                    for i in range(contexts[tree], contexts[tree] + 7)
                ]
                for place in range(1, counts[tree] + 1):
                    expected[slots[place]] = source[slots[path[place]]]
            assert torch.equal(part.float().view(-1, 4), expected)
