"""What vLLM reports after a step: the rows of its batch, with the tokens just sampled."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class RowSampling(NamedTuple):
    """Sampling parameters of a row, where they are known. A draft made with the same noise is accepted more often."""

    params: SamplingParams = GREEDY
    seed: int = 0


UNKNOWN = RowSampling()


class Batch(NamedTuple):
    """The rows of vLLM's batch after a step."""

    sampled: Sequence[Sequence[int]]
    """Tokens that the step added to each row; none while its prompt is computed."""
    lengths: NDArray[np.int32]
    """Tokens of each row."""
    tokens: NDArray[np.int32]
    """[R, max_model_len]"""
    sampling: Sequence[RowSampling] = ()
    """Empty: not known."""
