"""What verification went by for every output token: logits or `p`, and of each draft tested its `q` and its draw."""

from dataclasses import dataclass

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.speculation.drafts import Draft
from paceline.speculation.verification.grammar import Grammar
from paceline.speculation.verification.verify import Verdict


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One output token."""

    logits: Tensor  # [V]
    p: Tensor | None  # [V]; None: a coupled round, which has none
    q: Tensor | None  # [V]; None: nothing was drafted here, or one-hot
    drafted: int | None
    """The draft that was tested here: the token itself, or the one it replaced. None: as for `q`."""


class Ledger:
    """A `Witness`. Rows of the vocabulary's width add up: `take` texts as soon as they are finished."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], dict[int, Entry]] = {}

    def begin(self, sequence: Sequence, grammar: Grammar | None) -> None:
        self._entries[sequence.request_id, sequence.choice] = {}

    def saw(self, sequence: Sequence, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        entries = self._entries.get((sequence.request_id, sequence.choice))
        if entries is None:
            return
        path = [0, *(1 + node for node in verdict.path)]
        logits, p = logits[path], None if verdict.law is None else verdict.law[path]  # copies: the batch's are let go
        # Only chains are drawn from a q here. Nodes after the first rejected one were never looked at.
        q = draft.q(logits.shape[1]) if p is not None and draft.is_chain else None
        for place in range(len(path)):
            is_tested = q is not None and place < len(draft)
            entries[sequence.num_output + place] = Entry(
                logits[place],
                None if p is None else p[place],
                q[place].clone() if q is not None and is_tested else None,
                draft.tokens[place] if is_tested else None,
            )

    def finished(self, sequence: Sequence) -> None:
        pass

    def take(self, request_id: str, choice: int) -> dict[int, Entry]:
        """Of a finished text, by output token. A stop may have cut the last round short, so there may be more than tokens;
        where rounds ran ahead on a device there are fewer."""
        return self._entries.pop((request_id, choice), {})
