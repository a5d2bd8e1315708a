"""Whether to fill short drafts up to the number of tokens that vLLM verifies at most.

By default vLLM captures complete CUDA graphs for steps in which every row has that many drafts, and runs other steps in pieces.
On a GPU with few rows, a step with drafts that are hardly ever accepted can take less time than one without drafts. Both are
measured. In other graph modes all steps run alike, and none is padded.
"""

from collections import Counter, deque
from collections.abc import Callable
from statistics import median

import numpy as np
from numpy.typing import NDArray

from paceline.vllm.batch import Batch

TRIALS = 4
"""Steps of each kind that are measured before one is preferred."""
RECENT = 16
"""Steps of a kind whose median counts."""
RETRY_STEPS = 256
"""Steps after which the other kind is measured again."""
MIN_GAIN = 1.03
"""Time of other steps over that of padded ones from which steps are padded."""


class Padding:
    """Compares the times of padded and other steps, by the scale of the batch."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._num_steps = Counter[int]()
        self._is_faster: dict[int, bool] = {}
        """Whether padded steps are faster, by scale, once both kinds are known."""

    def decide(self, batch: int) -> bool:
        """Whether the next step of `batch` rows is padded."""
        scale = batch.bit_length()
        self._num_steps[scale] += 1
        is_faster = self._is_faster.get(scale)
        if is_faster is None:
            padded, other = (self._seconds.get((scale, is_padded), ()) for is_padded in (True, False))
            return len(padded) <= len(other)
        return is_faster != (self._num_steps[scale] % RETRY_STEPS == 0)

    def observe(self, batch: int, is_padded: bool, seconds: float) -> None:
        """A step without prompts took `seconds`."""
        scale = batch.bit_length()
        self._seconds.setdefault((scale, is_padded), deque(maxlen=RECENT)).append(seconds)
        padded, other = (self._seconds.get((scale, kind), ()) for kind in (True, False))
        if len(padded) >= TRIALS and len(other) >= TRIALS:
            self._is_faster[scale] = MIN_GAIN * median(padded) < median(other)


class PaddedDrafts:
    """Fills the drafts of a step up to the same length where such steps are faster."""

    def __init__(self, max_depth: int, has_uniform_graphs: Callable[[], bool]) -> None:
        """`has_uniform_graphs`: whether only steps with the same number of drafts for all rows have complete graphs."""
        self.num_padded = 0
        """Steps whose drafts were padded."""
        self._max_depth, self._has_uniform_graphs = max_depth, has_uniform_graphs
        self._with_drafts, self._without = Padding(), Padding()
        self._measured = self._without
        """That of the step under way."""
        self._is_padded: bool | None = None
        """Whether the drafts of the step under way are padded; None: there was no choice."""

    def observe(self, batch: Batch, lengths: NDArray[np.int64], seconds: float) -> None:
        """Learn from a step in which the rows of the step before it, of `lengths` tokens, decoded, and nothing else."""
        if self._is_padded is None or len(batch.sampled) != len(lengths):
            return
        grown = batch.lengths[: len(batch.sampled)] - lengths
        if ((grown >= 1) & (grown <= self._max_depth + 1)).all():
            self._measured.observe(len(grown), self._is_padded, seconds)

    def apply(self, batch: Batch, drafts: list[list[int]]) -> list[list[int]]:
        """The drafts, filled up or not."""
        self._is_padded, count = None, len(drafts)
        longest = batch.tokens.shape[1] - self._max_depth - 1
        if (
            not self._has_uniform_graphs()
            or not count
            or not all(batch.sampled)
            or int(batch.lengths[:count].max()) > longest
        ):
            return drafts
        if all(len(draft) == self._max_depth for draft in drafts):
            return drafts
        self._measured = self._with_drafts if any(drafts) else self._without
        self._is_padded = self._measured.decide(count)
        return self.repeat(batch, drafts)

    def repeat(self, batch: Batch, drafts: list[list[int]]) -> list[list[int]]:
        """The drafts, filled up if those of the step before were. A row that repeats its last token accepts what is right and
        no more, as with any draft."""
        if not self._is_padded:
            return drafts
        self.num_padded += 1
        return [
            draft + [tokens[-1]] * (self._max_depth - len(draft))
            for draft, tokens in zip(drafts, batch.sampled, strict=True)
        ]
