"""Sizes of passes that between them want every kernel that any pass will."""

from collections.abc import Iterator


def pass_sizes(max_num_seqs: int, max_rows: int, longest: int) -> Iterator[tuple[int, int]]:
    """(sequences, rows of each) for passes of any size: up to so many sequences, rows, and rows of a sequence.

    Products have a kernel for each multiple of 16 they are padded to, and another where nothing is. Contexts are cut up by
    powers of two, and their kernels change past a power; midway there is still room for more rows than at the next one.
    """
    powers = powers_of_two(2 * max_num_seqs)
    counts = {size for power in powers for size in (power, power + 1, power + power // 2)} | {*around_16s(powers[-1])}
    for count in sorted({min(count, max_num_seqs) for count in counts}):
        most = min(max_rows // count, longest)
        for rows in sorted({min(rows, most) for rows in (1, 2, *around_16s(2 * most))} - {0}):
            yield count, rows


def powers_of_two(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]


def around_16s(most: int) -> list[int]:
    """16, 32, 64, … and one less."""
    return [size for power in powers_of_two(most)[4:] for size in (power - 1, power)]
