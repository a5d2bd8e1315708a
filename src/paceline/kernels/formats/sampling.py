"""Numbers that samplers share."""

import math

import torch

from paceline.core.request import SamplingParams


def log_min_p(params: SamplingParams) -> float:
    """The logarithm of min-p; -inf: off."""
    return torch.tensor(params.min_p).log().item() if params.min_p > 0.0 else -math.inf
