"""Sizes of measured batches, and the order in which they are measured."""

from paceline.tools.profile.passes import batch_sizes


def test_the_ends_of_the_batch_sizes_are_measured_first() -> None:
    assert batch_sizes(256) == [1, 256, 16, 4, 64, 2, 8, 32, 128]
    assert batch_sizes(6) == [1, 6, 2, 4]
    assert (batch_sizes(2), batch_sizes(1)) == ([1, 2], [1])
