"""Verification: the accepted part of each draft, and the token after it.

`coupled` compares drafts with the target's own picks. `rejection` accepts by probability. By either rule the text has the
target's distribution. With `coupled` it is the same text as without drafts. Greedy decoding is either rule with a one-hot `p`:
a token is accepted if it is the arg-max. A coupled verdict accepts a drafted token if it equals the target's own pick, which is
exact for any draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.request import Verification
from paceline.core.sequence import Origin
from paceline.speculation.distribution import pick
from paceline.speculation.drafts import Draft
from paceline.speculation.rows import Facts, RowContext, row_contexts
from paceline.speculation.verification import rejection
from paceline.speculation.verification import verification as coupled


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


PLAIN = (Origin.PLAIN,)
"""Origins of a round without drafts."""


class Round(NamedTuple):
    """The draft of one sequence and the rows that verify it: after the last committed token, then after each node."""

    rows: tuple[RowContext, ...]
    draft: Draft
    rule: Verification

    @classmethod
    def of(cls, facts: Facts, draft: Draft, rule: Verification, masks: Sequence[Tensor] | None = None) -> "Round":
        return cls(row_contexts(facts, draft, masks), draft, rule)

    @property
    def is_coupled(self) -> bool:
        return self.rule == "coupled" or self.rows[0].params.is_greedy


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a round. `path` has the accepted nodes in order. `tokens` are their tokens and the target's own token after
    them, which is *recovered* after a rejection and *bonus* after a draft that was accepted whole (`origins`)."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    picks: tuple[int, ...] = ()
    """Coupled rounds: the target's pick of every row, after the last committed token, then after each node."""
    p: Tensor | None = field(default=None, compare=False, repr=False)  # [1 + len(draft), V]
    """Rejection rounds: the distribution of every row, by which tokens were accepted and drawn."""


def verify(logits: Tensor, rounds: Sequence[Round]) -> list[Verdict]:
    """Verdicts in the order of `rounds`, whose rows are consecutive in logits [R, V]."""
    is_coupled = [round_.is_coupled for round_ in rounds]
    by_pick = [i for i, coupled_ in enumerate(is_coupled) if coupled_]
    by_ratio = [i for i, coupled_ in enumerate(is_coupled) if not coupled_]
    outcomes: dict[int, tuple[list[int], int, Sequence[int], Tensor | None]] = {}
    if by_pick:
        rows = [row for i in by_pick for row in rounds[i].rows]
        picks: list[int] = pick(_rows_of(logits, rounds, by_pick), rows).tolist()
        start = 0
        for i in by_pick:
            own = picks[start : start + len(rounds[i].rows)]
            outcomes[i] = (*coupled.walk(rounds[i].draft, own), own, None)
            start += len(own)
    if by_ratio:
        walks = rejection.walk_all(
            _rows_of(logits, rounds, by_ratio), [(rounds[i].rows, rounds[i].draft) for i in by_ratio]
        )
        outcomes.update((i, (path, token, (), p)) for i, (path, token, p) in zip(by_ratio, walks, strict=True))
    return [_verdict(round_.draft, *outcomes[i]) for i, round_ in enumerate(rounds)]


def verify_picks(picks: Sequence[int], drafts: Sequence[Draft]) -> list[Verdict]:
    """Verdicts of coupled rounds from the target's picks of their 1 + len(draft) rows each, one after the other."""
    verdicts, start = [], 0
    for draft in drafts:
        own = picks[start : start + 1 + len(draft.tokens)]
        verdicts.append(_verdict(draft, *coupled.walk(draft, own), own, None))
        start += len(own)
    return verdicts


def _rows_of(logits: Tensor, rounds: Sequence[Round], chosen: Sequence[int]) -> Tensor:
    if len(chosen) == len(rounds):
        return logits
    starts = [0]
    for round_ in rounds:
        starts.append(starts[-1] + len(round_.rows))
    index = [row for i in chosen for row in range(starts[i], starts[i + 1])]
    return logits[torch.tensor(index, device=logits.device)]


def _verdict(draft: Draft, path: list[int], token: int, picks: Sequence[int], p: Tensor | None) -> Verdict:
    if not draft.tokens:  # most rounds of a large batch
        return Verdict((), (token,), PLAIN, tuple(picks), p)
    if (path[-1] if path else -1) in draft.parents:
        last = Origin.RECOVERED
    else:
        last = Origin.BONUS
    tokens = (*(draft.tokens[node] for node in path), token)
    return Verdict(tuple(path), tokens, (*(Origin.ACCEPTED,) * len(path), last), tuple(picks), p)
