import pytest
import torch
from torch import Tensor

from paceline.kernels.gpu.cache.rows import copy_rows
from tests.kernels.gpu.cases import DEVICE


def addresses(planes: list[Tensor]) -> list[int]:
    return [plane.data_ptr() for plane in planes]


@pytest.mark.parametrize("width", [8, 48, 3 * 8192 + 8])
def test_rows_of_all_planes_are_copied_and_no_other(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    planes = [torch.randint(256, (7, width), dtype=torch.uint8, generator=generator).to(DEVICE) for _ in range(3)]
    gathered = torch.zeros(2, 3, width, dtype=torch.uint8, device=DEVICE)
    rows = [gathered.data_ptr() + i * width for i in range(3)]
    copy_rows(addresses(planes), rows, [6, 2], [0, 1], (width, 3 * width), width, DEVICE)
    for i, plane in enumerate(planes):
        assert torch.equal(gathered[:, i], plane[[6, 2]])

    targets = [torch.zeros(9, width, dtype=torch.uint8, device=DEVICE) for _ in planes]
    copy_rows(rows, addresses(targets), [0, 1], [8, 3], (3 * width, width), width, DEVICE)
    copy_rows(addresses(planes), addresses(targets), [0], [5], (width, width), width, DEVICE)
    for target, plane in zip(targets, planes, strict=True):
        assert torch.equal(target[[8, 3, 5]], plane[[6, 2, 0]])
        assert not target[[0, 1, 2, 4, 6, 7]].any()
