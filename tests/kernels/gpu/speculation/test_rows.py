import pytest
import torch

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.gpu.speculation.rows import place_rows
from tests.kernels.cases import generator
from tests.kernels.gpu.cases import on_device


@pytest.mark.parametrize(
    ("lengths", "rows", "offset"),
    [([2], 1, -1), ([2, 17, 16, 31, 33], 1, -1), ([2, 18, 15, 40], 5, -1), ([9, 16, 20], 2, -2), ([5] * 70, 4, 3)],
)
def test_rows_follow_the_cached_tokens(lengths: list[int], rows: int, offset: int) -> None:
    width = (max(lengths) + offset + rows) // BLOCK_SIZE + 1
    order = torch.randperm(len(lengths) * (width + 2), generator=generator(0))
    tables = order.view(len(lengths), -1).to(torch.int32)
    contexts = torch.full((len(lengths),), -7, dtype=torch.int32)
    positions, slots = (torch.full((len(lengths) * rows,), -7) for _ in range(2))
    given = on_device(torch.tensor(lengths, dtype=torch.int32), tables, contexts, positions, slots)
    # a view with a row stride larger than its width, as block tables have
    place_rows(given[0], offset, given[1][:, :width], *given[2:], max_position=40)
    expected = [[length + offset + row for row in range(rows)] for length in lengths]
    assert given[2].tolist() == [length + offset for length in lengths]
    assert given[3].tolist() == [min(index, 39) for own in expected for index in own]
    assert given[4].tolist() == [
        int(tables[s, index // BLOCK_SIZE]) * BLOCK_SIZE + index % BLOCK_SIZE
        for s, own in enumerate(expected)
        for index in own
    ]
    assert given[0].tolist() == lengths
