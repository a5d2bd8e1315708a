"""The coupled rule: a drafted token is accepted if it equals the target's own pick. Exact for any draft."""

from collections.abc import Sequence

from paceline.speculation.drafts import Draft


def walk(draft: Draft, picks: Sequence[int]) -> tuple[list[int], int]:
    """(accepted nodes, next token) from the picks of the 1 + len(draft) rows."""
    if not draft.tokens:
        return [], picks[0]
    path: list[int] = []
    node = -1
    # One pass is enough: parents precede children, and at most one of several siblings can equal the pick
    for child, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent == node and token == picks[node + 1]:
            path.append(child)
            node = child
    return path, picks[node + 1]
