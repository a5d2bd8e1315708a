import math

import torch

from paceline.kernels.rope import FrequencyFactors, Llama3Scaling, rotary_table


def test_angles_are_exact_at_large_positions() -> None:
    cos, sin = rotary_table(head_dim=8, theta=10000.0, scaling=None, num_positions=100_001)
    for pair, frequency in enumerate((1.0, 0.1, 0.01, 0.001)):
        assert math.isclose(cos[100_000, pair], math.cos(100_000 * frequency), abs_tol=1e-6)
        assert math.isclose(sin[100_000, pair], math.sin(100_000 * frequency), abs_tol=1e-6)


def test_frequency_factors_equal_the_scaling_they_replace() -> None:
    rule = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    frequencies = 500000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    factors = FrequencyFactors(tuple((frequencies / rule(frequencies)).tolist()))
    assert max(factors.factors) == 8.0
    assert min(factors.factors) == 1.0
    for one, other in zip(rotary_table(128, 5e5, rule, 300), rotary_table(128, 5e5, factors, 300), strict=True):
        torch.testing.assert_close(one, other)
