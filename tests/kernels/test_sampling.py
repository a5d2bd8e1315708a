"""The native picks and rankings against those of torch."""

from dataclasses import replace

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.kernels.cpu import native
from paceline.kernels.sampling import can_sample, rank_sampled, sample
from paceline.speculation.distribution import distribution
from paceline.speculation.distribution.distribution import pick, sampled_row
from paceline.speculation.rows.rows import RowContext
from paceline.speculation.trees.growth import RankRules

pytestmark = pytest.mark.skipif(not native.available(), reason="needs the native kernels")

KINDS: list[dict[str, float]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.05},
    {"top_k": 9, "top_p": 0.7, "min_p": 0.02},
    {"top_p": 0.999},
]


def rows_of(count: int, temperature: float, **params: float) -> list[RowContext]:
    sampling = SamplingParams(temperature=temperature, **params)  # type: ignore[arg-type]
    return [RowContext(sampling, 5, 1, 100 + i, [1], 1) for i in range(count)]


def logits_of(seed: int, rows: int, width: int) -> torch.Tensor:
    """Rows with equal values at the boundary of a truncation."""
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * (1 + seed % 4)
    values[:, : width // 2] = values[:, : width // 2].round()
    return values


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_picks_are_those_of_torch(params: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(24):
        logits = logits_of(seed, 4, 1003 + 2000 * (seed % 3))
        rows = rows_of(4, 0.3 + seed % 4 * 0.4, **params)
        assert can_sample(logits)
        picks = pick(logits, rows)
        with monkeypatch.context() as patch:
            patch.setattr(distribution, "can_sample", lambda logits: False)
            assert torch.equal(picks, pick(logits, rows))


@pytest.mark.parametrize("params", KINDS, ids=str)
def test_a_pick_does_not_depend_on_the_batch(params: dict[str, float]) -> None:
    logits, rows = logits_of(3, 7, 2100), rows_of(7, 0.8, **params)
    together = sample(logits, [sampled_row(row) for row in rows])
    alone = [sample(logits[i : i + 1].clone(), [sampled_row(row)]) for i, row in enumerate(rows)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_no_number_is_picked_as_by_torch(value: float) -> None:
    logits, rows = logits_of(1, 1, 500), rows_of(1, 1.0)
    logits[0, [70, 200]] = value
    assert pick(logits, rows).tolist() == [70]


def test_tokens_that_are_excluded_are_never_picked() -> None:
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [17, 4000]] = 1.0
    for params in KINDS:
        picks = {
            int(sample(logits, [sampled_row(replace(row, position=at))])[0])
            for at in range(40)
            for row in rows_of(1, 1.0, **params)
        }
        assert picks == {17, 4000}


@pytest.mark.parametrize("is_coupled", [True, False])
@pytest.mark.parametrize("params", [{}, {"top_k": 50}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_rankings_are_those_of_torch(params: dict[str, float], is_coupled: bool) -> None:
    ids = torch.arange(0, 6000, 3)
    for seed in range(12):
        logits = torch.randn(3, len(ids), generator=torch.Generator().manual_seed(seed)) * 6
        rows = rows_of(3, 0.6, **params)
        columns, confidence = rank_sampled(logits, [sampled_row(row) for row in rows], [is_coupled] * 3, ids, 8)
        expected, values = RankRules.of(rows, [is_coupled] * 3, ids, logits).best(logits, 8)
        kept = confidence > -torch.inf
        assert (values[~kept] < -9.0).all()  # others are left out
        assert torch.equal(columns[kept], expected[kept])
        assert torch.allclose(confidence[kept], values[kept], atol=0.05)
