"""Plain steps taken only to be timed. While a batch drafts, only they measure what decoding without drafts takes."""

from dataclasses import dataclass

FIRST, EVERY = 4, 200
"""Drafting steps between two baselines: at first, and in the long run. The very first step is a baseline too."""
CLEAR_ADVANTAGE = 1.5
"""Advantage of drafting from which a baseline hardly changes a decision, and loses a third of a step or more. After the first
two of a scale the next one then waits as long as in the long run."""
MAX_MISSED = 2
"""Untimed baselines in a row that are repeated at once."""


@dataclass(slots=True)
class _Count:
    num_drafted: int = 0
    interval: int = 0
    num_missed: int = 0


class Baselines:
    """Counts by scale of the batch, a power of two: a time measured for few sequences does not hold for many."""

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}
        self._is_pending = False  # a baseline was requested and not observed yet
        self._last_drafting = 0  # batch of the last step if it drafted; baselines do not count

    def is_due(self, batch: int, would_draft: bool, advantage: float | None = None) -> bool:
        """Whether this step is a baseline instead of drafting. Call it once for every step. `advantage` is the expected speed
        of the drafts over plain decoding, None if it is not known."""
        if not would_draft:
            self._last_drafting = 0
            return False
        if self._is_pending and 2 * self._last_drafting < batch:
            return True  # starting to draft is expensive: no batch starts before the baseline is observed
        if self._count_step(batch, advantage):
            self._is_pending = True
            return True
        self._last_drafting = batch
        return False

    def observe_plain(self, batch: int, is_timed: bool, is_loss: bool) -> None:
        """A plain step, whether it was a baseline or not. The next drafting step becomes a baseline again if this was one
        without a time, or if drafting loses by this measurement."""
        was_pending, self._is_pending = self._is_pending, False
        count = self._count(batch)
        if is_timed:
            count.num_drafted, count.interval, count.num_missed = 0, max(FIRST, count.interval), 0
            is_repeated = is_loss
        else:
            count.num_missed += was_pending
            is_repeated = was_pending and count.num_missed <= MAX_MISSED
        if is_repeated:
            count.num_drafted = EVERY

    def num_drafted(self, batch: int) -> int:
        """Drafting steps since the last plain one."""
        return self._count(batch).num_drafted

    def _count_step(self, batch: int, advantage: float | None) -> bool:
        """Count a drafting step; whether it is to be a baseline."""
        count = self._count(batch)
        count.num_drafted += 1
        is_clear = count.interval > FIRST and advantage is not None and advantage >= CLEAR_ADVANTAGE
        if count.num_drafted <= (EVERY if is_clear else count.interval):
            return False
        count.num_drafted, count.interval = 0, min(max(FIRST, 2 * count.interval), EVERY)
        return True

    def _count(self, batch: int) -> _Count:
        return self._counts.setdefault(batch.bit_length(), _Count())
