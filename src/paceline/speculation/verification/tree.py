"""Token trees as parent lists: `parents[i]` is a node before `i`, or -1 for a child of the last committed token.

In a forward pass the last committed token is row 0 of its sequence and node `i` is row `1 + i`.
"""

from collections.abc import Sequence

from paceline.core.errors import PacelineError
from paceline.kernels.formats.layout import MAX_TREE_ROWS
from paceline.speculation.drafts import Draft

MAX_NODES = MAX_TREE_ROWS - 1


class InvalidDraft(PacelineError):
    """A proposer returned something that is not a tree of tokens. The engine drops the draft and decodes plainly."""


def ancestors(parents: Sequence[int]) -> list[int]:
    """Per row (1 + len(parents) rows) a bitmask of the rows it attends to, itself included, as signed 64-bit integers."""
    masks = [1]
    for row, parent in enumerate(parents, start=1):
        masks.append(masks[parent + 1] | 1 << row)
    return [mask - 2**64 if mask >= 2**63 else mask for mask in masks]


def validate(draft: Draft, vocab_size: int) -> None:
    """Raise `InvalidDraft` unless the draft is a valid tree."""
    if len(draft) > MAX_NODES:
        raise InvalidDraft(f"a draft has at most {MAX_NODES} nodes, got {len(draft)}: prune it first")
    seen = set()
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if not -1 <= parent < node:
            raise InvalidDraft(f"node {node} has parent {parent}: a parent precedes its children")
        if not 0 <= token < vocab_size:
            raise InvalidDraft(f"node {node} has token {token}, outside the target's vocabulary of {vocab_size}")
        if (parent, token) in seen:
            raise InvalidDraft(f"token {token} is drafted twice under node {parent}: siblings differ")
        seen.add((parent, token))
    if draft.probs is not None and not 0 <= draft.rows.start <= draft.rows.stop <= len(draft.probs.probs):
        raise InvalidDraft(f"rows {draft.rows} lie outside the {len(draft.probs.probs)} distributions")
    if draft.probs is not None and draft.probs.ids is None and draft.probs.probs.shape[1] != vocab_size:
        raise InvalidDraft(f"dense q has {draft.probs.probs.shape[1]} columns, the target's vocabulary {vocab_size}")


def prune(draft: Draft, budget: int) -> Draft:
    """The first `budget` nodes. A prefix is closed under parents; a cut by count alone keeps rejection sampling exact."""
    if len(draft) <= budget:
        return draft
    rows = slice(draft.rows.start, draft.rows.start + budget)
    return Draft(draft.tokens[:budget], draft.parents[:budget], draft.probs, rows)
