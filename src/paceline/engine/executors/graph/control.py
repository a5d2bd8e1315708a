"""What goes up with a launch: who is active, how many nodes each may have, and where their keys and values lie."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int32]]


class TableRows:
    """Block tables by seat; what a seat does not hold is scratch. A table that is the same object as before has only grown:
    what is new of it is all there is to write."""

    def __init__(self, rows: Numbers, scratch: int) -> None:
        self._rows, self._scratch = rows, scratch
        self.clear()

    def clear(self) -> None:
        """Nobody holds anything."""
        self._rows[:] = self._scratch
        self._tables: list[Seq[int]] = [()] * len(self._rows)
        self._counts = [0] * len(self._rows)

    def write(self, tables: Seq[Seq[int]]) -> None:
        for seat, (table, known, start) in enumerate(zip(tables, self._tables, self._counts, strict=False)):
            count = len(table)
            if table is known and count == start:
                continue
            if table is not known:
                self._rows[seat] = self._scratch
                start = 0
            self._rows[seat, start:count] = table[start:]
            self._tables[seat], self._counts[seat] = table, count


class Control:
    """One launch's, in memory that nobody else writes to."""

    def __init__(self, numbers: Numbers, size: int, width: int, scratch: int, draft_scratch: int | None) -> None:
        """`width`: of the target's tables; the draft's, if there is one, have what is left."""
        self._active, self._limits = numbers[: 2 * size].reshape(2, size)
        own, drafts = np.split(numbers[2 * size :], [width * size])
        self._tables = TableRows(own.reshape(size, width), scratch)
        self._draft_tables = None if draft_scratch is None else TableRows(drafts.reshape(size, -1), draft_scratch)

    def clear(self) -> None:
        """Others board: what was written is no longer theirs."""
        self._tables.clear()
        if self._draft_tables is not None:
            self._draft_tables.clear()

    def write(self, limits: Seq[int | None], tables: Seq[Seq[int]], draft_tables: Seq[Seq[int]]) -> None:
        """By seat, as `DeviceBatch.launch` gets them."""
        seats = len(limits)
        self._active[:seats] = [limit is not None for limit in limits]
        self._limits[:seats] = [limit or 0 for limit in limits]
        self._active[seats:] = self._limits[seats:] = 0
        self._tables.write(tables)
        if self._draft_tables is not None:
            self._draft_tables.write(draft_tables)
