"""The largest values of rows: columns and values as torch gives them, for every width."""

import math

import pytest
import torch

from paceline.kernels.cpu import native
from paceline.kernels.sampling import arg_max, top, top_with_exact_total, top_with_total


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


def shifted(rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows whose largest value is 0; those of few bits have many equal values."""
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).to(dtype).to(torch.float32)
    return scores - scores.amax(1, keepdim=True)


@pytest.mark.parametrize("width", [1, 7, 100, 4096, 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_total_without_native_kernels_is_exact(
    width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = shifted(9, width, dtype)
    columns, values, totals = (part.clone() for part in top_with_exact_total(scores, 6))
    monkeypatch.setattr(native, "supports", lambda _: False)
    found = top_with_exact_total(scores, 6)
    assert torch.equal(found[0], columns)  # equal values by column
    assert torch.equal(found[1], values)
    torch.testing.assert_close(found[2], totals, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found[2], scores.double().logsumexp(1, keepdim=True).float(), atol=1e-7, rtol=2e-7)
    order = torch.randperm(width)
    for rows in (scores[4:5], scores[2:7], scores.repeat(5, 1)[4:]):
        again = top_with_exact_total(rows, 3)
        row = int((rows == scores[4]).all(1).nonzero()[0])
        assert torch.equal(again[0][row], columns[4, :3])
        assert torch.equal(again[2][row], found[2][4])
    assert torch.equal(top_with_exact_total(scores[:, order], 1)[2], found[2])  # in any order of the sum


def test_equal_logits_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "supports", lambda _: False)
    width = 300_000
    _, _, totals = top_with_exact_total(torch.zeros(1, width), 1)
    assert totals.item() == pytest.approx(math.log(width))
