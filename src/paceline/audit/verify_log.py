"""The inputs of verification for every output token: logits or `p`, and the `q` of each tested draft."""

from dataclasses import dataclass

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.engine.executors.executor import SequenceResult, StepResult
from paceline.engine.hooks.hook import StepHook
from paceline.speculation.verification.grammar import Grammar


@dataclass(frozen=True, slots=True, eq=False)
class LoggedToken:
    """One output token."""

    logits: Tensor  # [V]
    p: Tensor | None  # [V]. None in a coupled round
    q: Tensor | None  # [V]. None if no token was drafted here, or if q is one-hot
    drafted: int | None
    """Draft that was tested here, which is the token itself or the token that it replaced. None if no token was drafted
    here."""


class VerifyLog(StepHook):
    """Keeps rows of the vocabulary's width, so `take` the entries of a text as soon as it is finished."""

    needs_logits = True

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], dict[int, LoggedToken]] = {}

    def sequence_added(self, sequence: Sequence, grammar: Grammar | None) -> None:
        self._entries[sequence.request_id, sequence.choice] = {}

    def verified(self, result: StepResult) -> None:
        for row in result.sequences:
            if row.verdict is not None and row.logits is not None:
                self._add(row, row.logits)

    def take(self, request_id: str, choice: int) -> dict[int, LoggedToken]:
        """Entries of a finished text by output token. A stop may have cut the last round, so that there are more entries than
        tokens. Steps that ran as graphs leave no entries."""
        return self._entries.pop((request_id, choice), {})

    def _add(self, row: SequenceResult, logits: Tensor) -> None:
        sequence, draft, verdict = row.sequence, row.draft, row.verdict
        entries = self._entries.get((sequence.request_id, sequence.choice))
        if entries is None or verdict is None:
            return
        path = [0, *(1 + node for node in verdict.path)]
        # Indexing copies, so that the tensors of the batch can be freed
        logits, p = logits[path], None if verdict.p is None else verdict.p[path]
        # Only chains are sampled from a q. Nodes after the first rejected one were not tested.
        q = draft.q(logits.shape[1]) if p is not None and draft.is_chain else None
        for place in range(len(path)):
            is_tested = q is not None and place < len(draft)
            entries[sequence.num_output + place] = LoggedToken(
                logits[place],
                None if p is None else p[place],
                q[place].clone() if q is not None and is_tested else None,
                draft.tokens[place] if is_tested else None,
            )
