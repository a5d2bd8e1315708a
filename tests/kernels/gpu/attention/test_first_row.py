"""A tree computed level by level equals the tree computed at once."""

import torch

from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import attention_plan
from paceline.kernels.gpu.attention.rotary import rotate_and_store
from paceline.speculation.verification.tree import ancestors
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import DEVICE

HEADS, KV_HEADS, WIDTH = 4, 2, 16
LEVELS, BEAMS, SEQUENCES = 3, 2, 2
PARENTS = [-1, -1, 0, 1, 3, 3]  # two beams per level; the last committed token has no row here
CONTEXTS = [3, 30]


def test_levels_computed_one_after_another():
    g = generator(4)
    rows = LEVELS * BEAMS
    qkv = torch.randn(SEQUENCES, rows, (HEADS + 2 * KV_HEADS) * WIDTH, generator=g).to(DEVICE)
    cache = [torch.randn(8, 16, KV_HEADS, WIDTH, generator=g).to(DEVICE) for _ in range(2)]
    turn = torch.rand(64, WIDTH // 2, generator=g).to(DEVICE)
    tables = torch.tensor([[5, 0, 2], [7, 3, 1]], dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor(CONTEXTS, dtype=torch.int32, device=DEVICE)
    masks = torch.tensor([mask >> 1 for mask in ancestors(PARENTS)[1:]], device=DEVICE).repeat(SEQUENCES, 1)
    positions = torch.tensor([[c + row // BEAMS for row in range(rows)] for c in CONTEXTS], device=DEVICE)

    def attend(first: int, last: int, memory: list[torch.Tensor]) -> torch.Tensor:
        count = last - first
        starts = torch.arange(0, SEQUENCES * count + 1, count, dtype=torch.int32, device=DEVICE)
        where = starts, contexts, tables
        own = qkv[:, first:last].flatten(0, 1).clone()
        q = rotate_and_store(own, positions[:, first:last].flatten(), turn, turn, *memory, *where, first)
        plan = attention_plan(
            SEQUENCES * count, SEQUENCES, count, HEADS, KV_HEADS, WIDTH, 64, DEVICE, num_splits=2, is_tree=True
        )
        lineage = masks[:, first:last].flatten()
        out = paged_attention(q, *memory, *where, plan, 0.25, lineage, first_row=first)
        return out.view(SEQUENCES, count, -1)

    ours, theirs = ([part.clone() for part in cache] for _ in range(2))
    levels = [attend(level * BEAMS, (level + 1) * BEAMS, ours) for level in range(LEVELS)]
    torch.testing.assert_close(torch.cat(levels, 1), attend(0, rows, theirs), rtol=1e-5, atol=1e-5)
    for part, other in zip(ours, theirs, strict=True):
        assert torch.equal(part, other)
