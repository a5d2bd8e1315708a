"""Where the rows of one forward pass live in the paged cache, and what each may see."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_SIZE = 16
"""Tokens per cache block."""

MAX_TREE_ROWS = 64
"""Rows of one sequence that a token tree may span: one bit each in `ancestors`."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """Rows are ragged: sequence `s` owns rows `starts[s]:starts[s+1]` of the pass.

    The keys and values of row `i` (counted inside its sequence) are stored at logical index `context_lens[s] + i`, found
    through `block_tables[s]`; `slots` holds the same as flat indices. A row sees the whole context, itself, and those earlier
    rows of its own sequence that are its ancestors. In a chain these are all earlier rows; in a tree, where rotary positions
    and logical indices part ways, `ancestors` says which.
    """

    slots: "Tensor"  # [T] int64, block * BLOCK_SIZE + offset
    starts: "Tensor"  # [S + 1] int32
    context_lens: "Tensor"  # [S] int32, tokens already cached before this pass
    block_tables: "Tensor"  # [S, max_blocks] int32, unused entries 0
    ancestors: "Tensor | None" = (
        None  # [T] int64 bitmask over the sequence's rows, -1: every earlier row; None: all chains
    )
