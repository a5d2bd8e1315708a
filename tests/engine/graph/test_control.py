"""Only what changed is written, and what is there is always what was said last."""

import random
from collections.abc import Sequence

import numpy as np

from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.graph.batch import BlockTableRows, ControlBuffer
from paceline.kv.block_tables import BlockTables

SCRATCH = 99


def rows(slots: int = 3, width: int = 4) -> tuple[np.ndarray, BlockTableRows]:
    memory = np.zeros((slots, width), dtype=np.int32)
    return memory, BlockTableRows(memory, SCRATCH)


def whole(tables: Sequence[Sequence[int]], width: int) -> list[list[int]]:
    return [[*table, *[SCRATCH] * (width - len(table))] for table in tables]


def test_unheld_rows_are_scratch() -> None:
    memory, tables = rows()
    tables.write([[1, 2], [3]])
    assert memory.tolist() == whole([[1, 2], [3], []], 4)


def test_of_a_table_that_grew_only_the_end_is_written() -> None:
    memory, tables = rows(1)
    blocks = [1]
    tables.write([blocks])
    memory[0, 0] = 7
    blocks.append(2)
    tables.write([blocks])
    assert memory.tolist() == whole([[7, 2]], 4)


def test_who_ended_leaves_no_block_behind() -> None:
    memory, tables = rows(2)
    one, other = [1, 2, 3], [4]
    tables.write([one, other])
    tables.write([(), other])
    assert memory.tolist() == whole([[], [4]], 4)


def test_slots_past_the_last_are_emptied() -> None:
    memory, tables = rows(2)
    tables.write([[1, 2, 3], [4]])
    tables.write([[5]])
    assert memory.tolist() == whole([[5], []], 4)


def test_a_table_that_was_rolled_back_is_written_anew() -> None:
    memory, written = rows(1)
    block_tables = BlockTables(8)
    block_tables.open(0, [1], "")
    block_tables.grow(0, 3 * BLOCK_SIZE)
    written.write([block_tables.blocks(0)])
    block_tables.shrink(0, BLOCK_SIZE)
    block_tables.open(1, [1], "")
    block_tables.grow(1, 2 * BLOCK_SIZE)  # takes what was given back
    block_tables.grow(0, 3 * BLOCK_SIZE)
    written.write([block_tables.blocks(0)])
    assert memory.tolist() == whole([block_tables.blocks(0)], 4)


def test_whatever_happens_to_tables_what_is_written_is_what_they_hold() -> None:
    dice, block_tables, width = random.Random(0), BlockTables(64, prefix_caching=False), 8
    numbers = [np.zeros(5 * (2 + width + width), dtype=np.int32) for _ in range(2)]
    controls = [ControlBuffer(memory, 5, width, SCRATCH, SCRATCH) for memory in numbers]
    for slot in range(5):
        block_tables.open(slot, [1], "")
    for turn in range(2000):
        for slot in range(5):
            size = dice.randint(1, width * BLOCK_SIZE)
            if slot not in block_tables:
                block_tables.open(slot, [1], "")
            elif dice.random() < 0.1:
                block_tables.close(slot)
            elif dice.random() < 0.3:
                block_tables.shrink(slot, size)
            else:
                block_tables.grow(slot, size)
        limits = [dice.randint(0, 3) if slot in block_tables else None for slot in range(5)]
        tables = [block_tables.blocks(slot) if slot in block_tables else () for slot in range(5)]
        drafts = [table if dice.random() < 0.7 else () for table in tables]
        controls[turn % 2].write(limits, tables, drafts)
        memory = numbers[turn % 2]
        assert memory[:5].tolist() == [int(limit is not None) for limit in limits]
        assert memory[5:10].tolist() == [limit or 0 for limit in limits]
        assert memory[10:].reshape(2, 5, width).tolist() == [whole(tables, width), whole(drafts, width)]


def test_where_there_is_no_draft_there_are_no_tables_of_it() -> None:
    memory = np.zeros(2 * (2 + 3), dtype=np.int32)
    ControlBuffer(memory, 2, 3, SCRATCH, None).write([1], [[5, 6]], [()])
    assert memory.tolist() == [1, 0, 1, 0, 5, 6, SCRATCH, *[SCRATCH] * 3]
