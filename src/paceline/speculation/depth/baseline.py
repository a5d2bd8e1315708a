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

    def is_due(self, batch: int) -> bool:
        """Whether this step is one, rather than draft as it was to. Asked once for every step that drafts."""
        count = self._count(batch)
        count.drafted += 1
        if count.drafted <= count.until:
            return False
        count.drafted, count.until = 0, min(max(FIRST, 2 * count.until), EVERY)
        return True

    def timed(self, batch: int) -> None:
        """A plain step was: one that was plain anyway is as good."""
        count = self._count(batch)
        count.drafted, count.until, count.missed = 0, max(FIRST, count.until), 0

    def missed(self, batch: int) -> None:
        """One was taken in a way that tells no time."""
        count = self._count(batch)
        count.missed += 1
        if count.missed <= MISSED:
            self.repeat(batch)

    def repeat(self, batch: int) -> None:
        """The next step is one too."""
        count = self._count(batch)
        count.drafted = count.until

    def drafted(self, batch: int) -> int:
        """Steps of drafting since the last plain one."""
        return self._count(batch).drafted

    def _count(self, batch: int) -> _Count:
        return self._counts.setdefault(batch.bit_length(), _Count())
