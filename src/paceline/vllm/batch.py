"""What vLLM reports after a step, the rows of its batch with the tokens just sampled, and the chain that it verifies."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.sampling import SamplingParams
from paceline.speculation.drafts import Draft

GREEDY = SamplingParams(temperature=0.0)


class RowSampling(NamedTuple):
    """Sampling parameters of a row, where they are known. A draft made with the same noise is accepted more often."""

    params: SamplingParams = GREEDY
    seed: int = 0


UNKNOWN = RowSampling()


class Batch(NamedTuple):
    """The rows of vLLM's batch after a step."""

    sampled: Sequence[Sequence[int]]
    """Tokens that the step added to each row. Empty while its prompt is computed."""
    lengths: NDArray[np.int32]
    """Tokens of each row."""
    tokens: NDArray[np.int32]
    """[R, max_model_len]"""
    sampling: Sequence[RowSampling] = ()
    """Sampling of each row. Empty if it is not known."""


def first_chain(draft: Draft, depth: int, vocab_size: int) -> tuple[int, ...]:
    """The first child of every node, down to `depth`. The chain ends before a token that the target does not have."""
    chain: list[int] = []
    node = -1
    for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if len(chain) == depth or not 0 <= token < vocab_size:
            break
        if parent == node:
            chain.append(token)
            node = child
    return tuple(chain)
