import torch

from paceline.models.memory.memory import StagedCopies, in_threads

CPU = torch.device("cpu")


def test_a_copy_in_chunks_equals_the_source() -> None:
    copies = StagedCopies(CPU, chunk_bytes=64)
    source = torch.randn(7, 11)
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.zeros(7, 11, dtype=dtype)
        copies.copy(target, source)
        assert torch.equal(target, source.to(dtype))


def test_a_source_with_gaps() -> None:
    source = torch.randn(6, 8)[:, ::2]
    target = torch.zeros(6, 4)
    StagedCopies(CPU, chunk_bytes=32).copy(target, source)
    assert torch.equal(target, source)


def test_results_are_in_order() -> None:
    assert in_threads(lambda number: number * 2, range(5), CPU) == [0, 2, 4, 6, 8]
