"""Zeroed memory that takes pages only where it is written."""

import resource

import torch

from paceline.models.memory.memory import zeroed

CPU = torch.device("cpu")


def test_it_is_zero_and_keeps_what_is_written() -> None:
    values = zeroed((3, 5), torch.float32, CPU)
    assert values.dtype is torch.float32
    assert not values.any()
    values[1, 2] = 7.0
    assert values.sum().item() == 7.0
    assert zeroed((0, 4), torch.float32, CPU).shape == (0, 4)
    assert zeroed((4,), torch.float8_e4m3fn, CPU).dtype is torch.float8_e4m3fn


def test_unwritten_pages_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = zeroed((1 << 28,), torch.float32, CPU)
    values[:: 1 << 26] = 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10
    assert values[1 << 26].item() == 1.0
