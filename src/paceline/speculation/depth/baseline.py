"""When a step is plain only to be timed: while drafts are made, nothing else says what decoding without them takes."""

from dataclasses import dataclass

FIRST, EVERY = 4, 200
"""Steps of drafting after which one is plain, besides the very first: at the beginning, and in the long run."""
MISSED = 2
"""In a row that told no time, after which the next is not taken at once."""


@dataclass(slots=True)
class _Count:
    drafted: int = 0
    until: int = 0
    missed: int = 0


class Baselines:
    """Counts by scale of the batch, a power of two: what is fresh for a few sequences says nothing of many."""

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}
        self._is_awaited = False  # one that nobody has seen the end of
        self._under_way = 0  # sequences of the last step, but for baselines, if it drafted

    def replaces(self, batch: int, would_draft: bool) -> bool:
        """Whether a step is one, rather than draft as it was to. Asked once for every step."""
        if not would_draft:
            self._under_way = 0
            return False
        if self._is_awaited and 2 * self._under_way < batch:
            return True  # it is dear to begin: nobody does before it was seen whether to
        if self._is_due(batch):
            self._is_awaited = True
            return True
        self._under_way = batch
        return False

    def saw(self, batch: int, is_timed: bool, is_loss: bool) -> None:
        """A plain step: one that was plain anyway is as good. The next that would draft is one too if this was to tell the time
        and did not, or if drafting loses by it."""
        was_awaited, self._is_awaited = self._is_awaited, False
        count = self._count(batch)
        if is_timed:
            count.drafted, count.until, count.missed = 0, max(FIRST, count.until), 0
            is_repeated = is_loss
        else:
            count.missed += was_awaited
            is_repeated = was_awaited and count.missed <= MISSED
        if is_repeated:
            count.drafted = count.until

    def drafted(self, batch: int) -> int:
        """Steps of drafting since the last plain one."""
        return self._count(batch).drafted

    def _is_due(self, batch: int) -> bool:
        count = self._count(batch)
        count.drafted += 1
        if count.drafted <= count.until:
            return False
        count.drafted, count.until = 0, min(max(FIRST, 2 * count.until), EVERY)
        return True

    def _count(self, batch: int) -> _Count:
        return self._counts.setdefault(batch.bit_length(), _Count())
