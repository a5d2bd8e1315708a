"""KL that rounding cannot fake and truncation cannot hide."""

import math

import pytest
import torch

from paceline.audit.divergence import divergence, is_draw, limit
from paceline.core.sampling import SamplingParams
from paceline.speculation.verification.distribution import log_distribution, sample_draft
from paceline.speculation.verification.rows import RowContext

TOLERANCE = 1e-4
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -200.0])


def row(**sampling: object) -> RowContext:
    return RowContext(SamplingParams(**sampling), 5, 0, 3, (1, 2, 3), 3)  # type: ignore[arg-type]


def law(one: RowContext, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    return log_distribution(logits.unsqueeze(0), [one])[0].exp()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8, "min_p": 0.05}])
def test_the_same_law_diverges_by_nothing(sampling: dict[str, float]) -> None:
    one = row(**sampling)
    assert divergence(law(one), LOGITS, one, TOLERANCE) < 1e-14


def test_it_is_kullback_and_leiblers() -> None:
    used, plain = law(row(temperature=1.0)).double(), law(row(temperature=0.5)).double()
    known = sum(float(u * math.log(u / p)) for u, p in zip(used, plain, strict=True) if u > 0 and p > 0)
    assert divergence(used, LOGITS, row(temperature=0.5), TOLERANCE) == pytest.approx(known, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fewer_bits_are_more_than_rounding_explains(dtype: torch.dtype) -> None:
    one = row()
    rounded = law(one).to(dtype).float()
    assert (divergence(rounded, LOGITS, one, TOLERANCE) > limit(TOLERANCE, 1.0)) == (dtype == torch.bfloat16)


def test_logits_within_the_contract_stay_below_the_limit() -> None:
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.3, 1.0):
        one = row(temperature=temperature)
        for _ in range(50):
            off = LOGITS + TOLERANCE * (2 * torch.rand(LOGITS.shape, generator=generator) - 1)
            assert divergence(law(one, off), LOGITS, one, TOLERANCE) <= limit(TOLERANCE, temperature)


def test_a_token_on_the_edge_of_a_truncation_may_fall_on_either_side() -> None:
    one = row(top_k=3)
    swapped = LOGITS.clone()
    swapped[3] = swapped[2] + 5e-5  # for whoever adds up in another order, number 4 is number 3
    near = LOGITS.clone()
    near[3] = near[2] - 2e-5
    assert divergence(law(one, swapped), near, one, TOLERANCE) < 1e-6
    assert divergence(law(one, swapped), LOGITS, one, TOLERANCE) == math.inf
    assert divergence(law(row(top_k=4)), LOGITS, one, TOLERANCE) == math.inf


def test_a_draw_is_replayed_from_its_noise() -> None:
    one = row(temperature=0.7)
    tokens, q = sample_draft(LOGITS.unsqueeze(0), [one])
    drawn = int(tokens[0])
    assert [is_draw(q[0], token, one) for token in range(6)] == [token == drawn for token in range(6)]
