"""The largest values of rows: columns and values as torch gives them, for every width."""

import pytest
import torch

from paceline.kernels.sampling import arg_max, top, top_with_total


@pytest.mark.parametrize("width", [1, 7, 64, 100, 1000, 4096])
def test_values_and_columns_are_those_of_torch(width: int) -> None:
    scores = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    columns, values, totals = top_with_total(scores, 8)
    expected = scores.topk(min(8, width), dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)
    torch.testing.assert_close(totals, scores.logsumexp(1, keepdim=True))
    assert torch.equal(arg_max(scores), scores.argmax(1))
    assert [part.tolist() for part in top(scores, 8)] == [columns.tolist(), values.tolist()]


def test_the_first_of_equal_values_comes_first() -> None:
    scores = torch.zeros(2, 300)
    scores[0, 200:210] = 1.0
    scores[1, 17] = -0.0
    assert arg_max(scores).tolist() == [200, 0]
    assert top_with_total(scores, 3)[0].tolist() == [[200, 201, 202], [0, 1, 2]]


def test_infinities_and_nan() -> None:
    scores = torch.full((3, 130), -torch.inf)
    scores[0, 129] = 2.0
    scores[1, 70], scores[1, 100] = torch.inf, torch.nan
    columns, values, totals = top_with_total(scores, 2)
    assert columns[0].tolist() == [129, 0]
    assert values[0].tolist() == [2.0, -torch.inf]
    assert totals[0].item() == pytest.approx(2.0)
    assert columns[1].tolist() == [100, 70]
    assert totals[2].item() == -torch.inf
    assert arg_max(scores).tolist() == scores.argmax(1).tolist()
