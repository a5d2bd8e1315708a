"""Drafts must pay for most sequences of a batch, not only on average.

Every sequence waits for the whole step. If a few sequences with good drafts make each step longer, the remaining sequences
become slower, and a batch ends with its slowest sequence. A batch therefore drafts only if three of four of its sequences are
faster with drafts than without.
"""

from collections import Counter, deque
from collections.abc import Sequence
from statistics import median_low

from paceline.vllm.decisions.record import DraftRecord

SLOW_SHARE = 4
"""Inverse share of the sequences that may be slower with drafts. A smaller batch has no limit but the depth policy's."""
RECENT = 16
"""Steps of a kind whose median counts."""
MIN_STEPS = 2
"""Steps of a kind before its time is known."""
FORGET_CALLS = 256
"""Decisions against drafts at a scale after which its steps with drafts are measured again."""
MIN_DRAFTING = 4
"""Decisions for drafts before they are judged again: the first round of a sequence shows little."""
START_MARGIN = 1.2
"""Speed, over that without drafts, from which a batch starts to draft. It stops below 1."""


class LatencyLimit:
    """Compares the times of steps with and without drafts, by the scale of the batch."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._seconds: dict[tuple[int, bool], deque[float]] = {}
        self._is_drafting = False
        self._num_drafting = 0
        """Decisions for drafts since the batch started to draft."""
        self._num_refused = Counter[int]()
        """Decisions against drafts, by scale, since the last step with drafts."""

    def observe(self, batch: int, is_drafted: bool, seconds: float) -> None:
        """A step without prompts, with the time of drafting for it, took `seconds`."""
        scale = batch.bit_length()
        self._seconds.setdefault((scale, is_drafted), deque(maxlen=RECENT)).append(seconds)
        if is_drafted:
            self._num_refused[scale] = 0

    def allows(self, records: Sequence[DraftRecord], num_sampled: int) -> bool:
        """Whether the batch of these sequences may draft. `num_sampled` sequences with a record are enough to judge the batch
        by. With fewer, sequences without a record count as those whose drafts are poor."""
        ratio = self._ratio(len(records))
        if ratio is None or len(records) < SLOW_SHARE:
            return True
        known = [record for record in records if record.num_trials]
        judged = known if len(known) >= num_sampled else records
        tokens = sorted(record.tokens(self._max_depth) for record in judged)
        speed = tokens[len(tokens) // SLOW_SHARE] / ratio
        is_held = self._is_drafting and self._num_drafting < MIN_DRAFTING
        self._is_drafting = is_held or speed >= (1.0 if self._is_drafting else START_MARGIN)
        self._num_drafting = self._num_drafting + 1 if self._is_drafting else 0
        if not self._is_drafting:
            self._refuse(len(records).bit_length())
        return self._is_drafting

    def _refuse(self, scale: int) -> None:
        self._num_refused[scale] += 1
        if self._num_refused[scale] >= FORGET_CALLS:
            self._num_refused[scale] = 0
            del self._seconds[scale, True]

    def _ratio(self, batch: int) -> float | None:
        """Time of a step with drafts over that of a step without drafts. None if it is not known."""
        drafted, plain = (self._seconds.get((batch.bit_length(), kind), ()) for kind in (True, False))
        if len(drafted) < MIN_STEPS or len(plain) < MIN_STEPS:
            return None
        return median_low(drafted) / median_low(plain)
