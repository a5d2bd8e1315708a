"""The inputs of a graph step that the host writes: active slots, draft limits and block tables."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int32]]


class BlockTableRows:
    """Block tables by slot; unused entries point to the scratch block. A table that is the same object as in the step before
    has only grown, so that only its new blocks are written."""

    def __init__(self, rows: Numbers, scratch: int) -> None:
        self._rows, self._scratch = rows, scratch
        self._rows[:] = scratch
        self._tables: list[Seq[int]] = [()] * len(self._rows)
        self._counts = [0] * len(self._rows)

    def write(self, tables: Seq[Seq[int]]) -> None:
        tables = [*tables, *[()] * (len(self._tables) - len(tables))]
        for slot, (table, known, start) in enumerate(zip(tables, self._tables, self._counts, strict=True)):
            count = len(table)
            if table is known and count == start:
                continue
            if table is not known:
                self._rows[slot] = self._scratch
                start = 0
            self._rows[slot, start:count] = table[start:]
            self._tables[slot], self._counts[slot] = table, count


class ControlBuffer:
    """The host's inputs of one step, in pinned memory of its own."""

    def __init__(self, numbers: Numbers, size: int, width: int, scratch: int, draft_scratch: int | None) -> None:
        """`width` is the number of columns of the target's block tables. The draft's tables take the rest of `numbers`."""
        self._active, self._limits = numbers[: 2 * size].reshape(2, size)
        own, drafts = np.split(numbers[2 * size :], [width * size])
        self._tables = BlockTableRows(own.reshape(size, width), scratch)
        self._draft_tables = None if draft_scratch is None else BlockTableRows(drafts.reshape(size, -1), draft_scratch)

    def write(self, limits: Seq[int | None], tables: Seq[Seq[int]], draft_tables: Seq[Seq[int]]) -> None:
        """Writes the arguments of `GraphBatch.submit`, which are by slot."""
        slots = len(limits)
        self._active[:slots] = [limit is not None for limit in limits]
        self._limits[:slots] = [limit or 0 for limit in limits]
        self._active[slots:] = self._limits[slots:] = 0
        self._tables.write(tables)
        if self._draft_tables is not None:
            self._draft_tables.write(draft_tables)
