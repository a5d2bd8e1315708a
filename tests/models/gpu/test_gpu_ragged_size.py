import pytest

from paceline.models.cuda_graph import MAX_GRAPH_ROWS
from paceline.models.gpu.ragged import MAX_RAGGED_ROWS, max_captured_rows, ragged_size, ragged_sizes


@pytest.mark.parametrize("max_num_seqs", [1, 40, 300])
def test_every_size_is_among_those_rehearsed(max_num_seqs: int) -> None:
    sizes = set(ragged_sizes(max_num_seqs, MAX_RAGGED_ROWS))
    met = {
        ragged_size(count, rows)
        for count in range(1, min(max_num_seqs, 256) + 1)
        for rows in range(count, MAX_RAGGED_ROWS + 1)
        if count > 1 or rows > MAX_GRAPH_ROWS  # that fits a rectangle
    }
    assert met <= sizes
    assert len(sizes) <= 3 * 24 + 24  # some tens of milliseconds each


def test_little_of_a_large_pass_is_padding() -> None:
    assert all(ragged_size(1, rows).rows <= rows * 9 // 8 for rows in range(512, MAX_RAGGED_ROWS + 1))


def test_small_models_have_larger_passes_recorded() -> None:
    assert max_captured_rows(270_000_000) == MAX_RAGGED_ROWS
    assert max_captured_rows(16_000_000_000) == 500
    assert max_captured_rows(140_000_000_000) < 64
