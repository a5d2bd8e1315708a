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
    p: Tensor | None  # [V]; None: a coupled round, which has none
    q: Tensor | None  # [V]; None: nothing was drafted here, or one-hot
    drafted: int | None
    """Draft that was tested here: the token itself, or the one it replaced. None: as for `q`."""


class VerifyLog(StepHook):
    """Keeps rows of the vocabulary's width: `take` the entries of a text as soon as it is finished."""

    needs_logits = True

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], dict[int, LoggedToken]] = {}

    def sequence_added(self, sequence: Sequence, grammar: Grammar | None) -> None:
        self._entries[sequence.request_id, sequence.choice] = {}

    def verified(self, result: StepResult) -> None:
        for one in result.sequences:
            if one.verdict is not None and one.logits is not None:
                self._add(one, one.logits)

    def take(self, request_id: str, choice: int) -> dict[int, LoggedToken]:
        """Entries of a finished text by output token. A stop may have cut the last round, so that there are more entries than
        tokens; steps that ran as graphs leave none."""
        return self._entries.pop((request_id, choice), {})

    def _add(self, one: SequenceResult, logits: Tensor) -> None:
        sequence, draft, verdict = one.sequence, one.draft, one.verdict
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
