"""Rows of a pass from a schedule and its drafts, and cache moves for accepted tree paths."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from paceline.engine.schedule import Schedule, Scheduled
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables
from paceline.models.runner import Span
from paceline.speculation.drafts import Draft, depths
from paceline.speculation.trees.tree import ancestors
from paceline.speculation.verification.verify import Verdict


def span_of(item: Scheduled, draft: Draft, blocks: Seq[int]) -> Span:
    """The committed tokens of the item, then its draft; logits of the newest token and of every node."""
    sequence, start = item.sequence, item.sequence.num_computed
    positions = visible = None
    if draft.tokens and not draft.is_chain:
        # Row 0 is the last committed token, row 1 + i node i: drafts are only made for a sequence that decodes.
        positions = [start, *(start + depth for depth in depths(draft.parents))]
        visible = ancestors(draft.parents)
    return Span(
        blocks=blocks,
        context_len=start,
        tokens=[*sequence.ids[start : start + item.num_tokens], *draft.tokens],
        num_logits=1 + len(draft) if item.completes else 0,
        positions=positions,
        ancestors=visible,
    )


def path_moves(plan: Schedule, verdicts: Mapping[int, Verdict], tables: BlockTables) -> tuple[list[int], list[int]]:
    """Source and target cache positions that make accepted tree paths contiguous; chains already are. Call it before commit:
    the rows of a sequence start at `num_computed`."""
    sources: list[int] = []
    targets: list[int] = []
    for item in plan.items:
        verdict = verdicts.get(item.sequence.id)
        if verdict is None:
            continue
        blocks = tables.blocks(item.sequence.id)
        first = item.sequence.num_computed + item.num_tokens
        for place, node in enumerate(verdict.path):
            if node != place:
                sources.append(_slot(blocks, first + node))
                targets.append(_slot(blocks, first + place))
    return sources, targets


def _slot(blocks: Seq[int], index: int) -> int:
    return blocks[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE
