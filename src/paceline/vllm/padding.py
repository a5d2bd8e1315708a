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

    def decide(self, batch: int) -> bool:
        """Whether the next step of `batch` rows is padded."""
        scale = batch.bit_length()
        self._num_steps[scale] += 1
        padded, other = (self._seconds.get((scale, is_padded), ()) for is_padded in (True, False))
        if len(padded) < TRIALS or len(other) < TRIALS:
            return len(padded) <= len(other)
        is_faster = median(padded) < median(other)
        return is_faster != (self._num_steps[scale] % RETRY_STEPS == 0)

    def observe(self, batch: int, is_padded: bool, seconds: float) -> None:
        """A step without prompts took `seconds`."""
        self._seconds.setdefault((batch.bit_length(), is_padded), deque(maxlen=RECENT)).append(seconds)
