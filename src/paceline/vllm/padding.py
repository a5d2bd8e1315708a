"""Whether to fill short drafts up to the number of tokens that vLLM verifies at most.

vLLM captures complete CUDA graphs for steps in which every row has that many drafts, and runs other steps in pieces. On a GPU
with few rows, a step with drafts that are hardly ever accepted can take less time than one without drafts. Both are measured.
"""

from collections import Counter, deque
from statistics import median

TRIALS = 4
"""Steps of each kind that are measured before one is preferred."""
RECENT = 16
"""Steps of a kind whose median counts."""
RETRY_STEPS = 256
"""Steps after which the other kind is measured again."""


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
            self._is_faster[scale] = median(padded) < median(other)
