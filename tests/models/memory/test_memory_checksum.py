"""Checksums of memory: different for any other bytes, and the same with native kernels and without."""

import torch

from paceline.kernels.cpu.checksums import word_sum, word_sum_reference
from paceline.models.memory.memory import WORDS, memory_checksum
from tests.kernels.cases import needs_native


def test_the_checksum_depends_on_every_byte_and_on_the_order() -> None:
    first, second = torch.arange(1003, dtype=torch.int32), torch.arange(5, dtype=torch.uint8)
    seen = {memory_checksum([first, second]), memory_checksum([second, first])}
    for at in (0, 1, 500, 1002):
        changed = first.clone()
        changed[at] ^= -(2**31)  # the highest bit
        seen.add(memory_checksum([changed, second]))
    changed = second.clone()
    changed[4] += 1
    seen.add(memory_checksum([first, changed]))
    assert len(seen) == 7
    assert memory_checksum([first, second]) == memory_checksum([first.clone(), second.clone()])
    assert memory_checksum([torch.empty(0)]) == memory_checksum([])


def test_the_checksum_covers_tensors_of_several_batches_of_words() -> None:
    long = torch.zeros(8 * (WORDS + 3), dtype=torch.uint8)
    before = memory_checksum([long])
    long[-1] = 1
    assert memory_checksum([long]) != before


@needs_native
def test_sums_of_words_equal_the_reference() -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (1037,), generator=torch.Generator().manual_seed(2))
    for part in (words, words[:1], words[:0], words[5:]):
        assert word_sum(part) == int(word_sum_reference(part)) % 2**64
