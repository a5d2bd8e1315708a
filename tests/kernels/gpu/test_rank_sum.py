"""The sum over ranks, with the memory of the other rank written by the test."""

import threading

import pytest
import torch
from torch import Tensor

from paceline.kernels.gpu.rank_sum import BLOCK, HALF_BYTES, MAX_PROGRAMS, MEMORY_BYTES, PART_BYTES, add_ranks
from tests.kernels.gpu.cases import DEVICE


class OtherRank:
    """Rank 1."""

    def __init__(self) -> None:
        self.memories = [torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        self.addresses = torch.tensor([one.data_ptr() for one in self.memories], dtype=torch.int64, device=DEVICE)
        self.turns = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=DEVICE)

    def marks(self, rank: int) -> Tensor:
        return self.memories[rank][2 * HALF_BYTES :].view(torch.int32)

    def write(self, values: Tensor, turn: int, program: int = 0) -> None:
        """Its values in a turn of one program."""
        first = turn % 2 * HALF_BYTES + program * PART_BYTES
        self.memories[1][first : first + PART_BYTES].view(values.dtype)[: len(values)] = values
        self.marks(1)[program] = turn

    def add(self, values: Tensor) -> Tensor:
        add_ranks(values, self.addresses, self.turns, 0)
        return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_of_several_turns(dtype: torch.dtype) -> None:
    """Each turn has its own values; longer ones use more programs, whose turns are their own."""
    other = OtherRank()
    ours, theirs = (torch.arange(BLOCK + 7, device=DEVICE).to(dtype) for _ in range(2))
    other.write(theirs[:5], 1)
    assert torch.equal(other.add(ours[:5].clone()), (ours + theirs)[:5])
    assert other.marks(0)[:2].tolist() == [1, 0]
    other.write(3 * theirs[:BLOCK], 2)
    other.write(3 * theirs[BLOCK:], 1, program=1)  # the second program is in its first turn
    assert torch.equal(other.add(ours.clone()), (ours.double() + (3 * theirs).double()).to(dtype))
    assert other.marks(0)[:3].tolist() == [2, 1, 0]


def test_values_of_another_type_leave_what_a_slow_rank_still_reads() -> None:
    """The second program is a turn behind the first, whose next turn is in the same half. Longer values must not reach over."""
    other = OtherRank()
    other.turns[0] = 1
    other.write(torch.zeros(BLOCK, device=DEVICE), 2)
    other.write(torch.zeros(4, device=DEVICE), 1, program=1)
    other.add(torch.full((BLOCK + 4,), 7.0, device=DEVICE))
    other.write(torch.zeros(BLOCK, dtype=torch.int64, device=DEVICE), 3)
    other.add(torch.zeros(BLOCK, dtype=torch.int64, device=DEVICE))
    written = other.memories[0].view(torch.float32) == 7.0
    assert int(written.sum()) == BLOCK + 4


def test_a_matrix_is_added_in_place() -> None:
    other = OtherRank()
    matrix = torch.ones(3, 4, device=DEVICE)
    other.write(torch.full((12,), 2.0, device=DEVICE), 1)
    other.add(matrix)
    assert torch.equal(matrix, torch.full((3, 4), 3.0, device=DEVICE))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a waiting kernel would block the copies of this test")
def test_a_rank_waits_for_the_other() -> None:
    other, values = OtherRank(), torch.ones(4)

    def answer() -> None:
        while other.marks(0)[0] != 1:  # this rank's values are there, and it waits
            pass
        other.write(torch.full((4,), 5.0), 1)

    thread = threading.Thread(target=answer)
    thread.start()
    other.add(values)
    thread.join()
    assert values.tolist() == [6.0] * 4


def test_turns_wrap_around() -> None:
    other, last = OtherRank(), 2**31 - 1
    other.turns[0] = last
    other.write(torch.full((4,), 2.0, device=DEVICE), -(2**31))
    assert other.add(torch.ones(4, device=DEVICE)).tolist() == [3.0] * 4
