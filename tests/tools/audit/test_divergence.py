"""Divergence of distributions, with rounding and truncation."""

import math

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.speculation.distribution.distribution import log_distribution, sample_draft
from paceline.speculation.rows.rows import RowContext
from paceline.tools.audit.tests import divergence, is_sample, limit

TOLERANCE = 1e-4
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -200.0])


def row(**sampling: object) -> RowContext:
    return RowContext(SamplingParams(**sampling), 5, 0, 3, (1, 2, 3), 3)  # type: ignore[arg-type]


def probs(one: RowContext, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    return log_distribution(logits.unsqueeze(0), [one])[0].exp()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8, "min_p": 0.05}])
def test_same_distribution_has_no_divergence(sampling: dict[str, float]) -> None:
    one = row(**sampling)
    assert divergence(probs(one), LOGITS, one, TOLERANCE) < 1e-14


def test_value_of_the_divergence() -> None:
    used, plain = probs(row(temperature=1.0)).double(), probs(row(temperature=0.5)).double()
    known = sum(float(u * math.log(u / p)) for u, p in zip(used, plain, strict=True) if u > 0 and p > 0)
    assert divergence(used, LOGITS, row(temperature=0.5), TOLERANCE) == pytest.approx(known, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bfloat16_exceeds_the_limit(dtype: torch.dtype) -> None:
    one = row()
    rounded = probs(one).to(dtype).float()
    assert (divergence(rounded, LOGITS, one, TOLERANCE) > limit(TOLERANCE, 1.0)) == (dtype == torch.bfloat16)


def test_logits_within_rounding_stay_below_the_limit() -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.3, 1.0):
        one = row(temperature=temperature)
        for _ in range(50):
            off = LOGITS + TOLERANCE * (2 * torch.rand(LOGITS.shape, generator=generator) - 1)
            assert divergence(probs(one, off), LOGITS, one, TOLERANCE) <= limit(TOLERANCE, temperature)


def test_tokens_on_the_edge_of_a_truncation_are_excluded() -> None:
    one = row(top_k=3)
    swapped = LOGITS.clone()
    swapped[3] = swapped[2] + 5e-5  # within rounding, the order of the two can change
    near = LOGITS.clone()
    near[3] = near[2] - 2e-5
    assert divergence(probs(one, swapped), near, one, TOLERANCE) < 1e-6
    assert divergence(probs(one, swapped), LOGITS, one, TOLERANCE) == math.inf
    assert divergence(probs(row(top_k=4)), LOGITS, one, TOLERANCE) == math.inf


def test_sample_is_replayed_from_its_noise() -> None:
    one = row(temperature=0.7)
    tokens, q = sample_draft(LOGITS.unsqueeze(0), [one])
    drawn = int(tokens[0])
    assert [is_sample(q[0], token, one) for token in range(6)] == [token == drawn for token in range(6)]
