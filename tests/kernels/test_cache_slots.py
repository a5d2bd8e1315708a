import pytest
import torch
from torch import Tensor

from paceline.kernels.cache_slots import CacheSlots, Planes, copy_rows, copy_rows_reference, copy_slots_reference
from tests.kernels.cases import needs_native


def caches(dtype: torch.dtype) -> list[Tensor]:
    values = torch.arange(3 * 4 * 16 * 2 * 5).view(3, 4, 16, 2, 5)
    return [one.clone() for one in (values % 97).to(dtype)]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("sources", "targets"), [([5], [2]), ([1, 2, 3, 63], [0, 1, 2, 3]), ([7, 40], [40, 7]), ([], [])]
)
def test_copies_equal_the_reference(dtype: torch.dtype, sources: list[int], targets: list[int]) -> None:
    native, reference = caches(dtype), caches(dtype)
    CacheSlots(native).copy(sources, targets)
    if sources:
        copy_slots_reference(reference, sources, targets)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(native, reference, strict=True))


@needs_native
@pytest.mark.parametrize("slots", [([64], [0]), ([0], [-1])])
def test_slots_outside_the_cache_are_refused(slots: tuple[list[int], list[int]]) -> None:
    with pytest.raises(IndexError):
        CacheSlots(caches(torch.float32)).copy(*slots)


@needs_native
def test_rows_equal_the_reference() -> None:
    planes = [torch.randint(256, (7, 40), dtype=torch.uint8) for _ in range(3)]
    found = [torch.zeros(2, 3, 40, dtype=torch.uint8) for _ in range(2)]
    for copy, one in zip((copy_rows, copy_rows_reference), found, strict=True):
        rows = Planes.interleaved(one.device, one.data_ptr(), 3, 40)
        copy(Planes.of(planes), [6, 2], rows, [1, 0])
        assert all(torch.equal(one[:, i], plane[[2, 6]]) for i, plane in enumerate(planes))
        back = [torch.zeros(5, 40, dtype=torch.uint8) for _ in planes]
        copy(rows, [1], Planes.of(back), [4])
        assert all(
            torch.equal(target[4], plane[6]) and not target[:4].any()
            for target, plane in zip(back, planes, strict=True)
        )
    copy_rows(Planes.of(planes), [], Planes.of(planes), [])
