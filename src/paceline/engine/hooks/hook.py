"""Who listens in on an engine, to check later what it did."""

from typing import Protocol

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.speculation.drafts import Draft
from paceline.speculation.verification.grammar import Grammar
from paceline.speculation.verification.verify import Verdict


class Witness(Protocol):
    """Called on the engine's thread; what it is given is to be read, not kept alive for long."""

    def begin(self, sequence: Sequence, grammar: Grammar | None) -> None:
        """A sequence was added."""
        ...

    def saw(self, sequence: Sequence, draft: Draft, verdict: Verdict, logits: Tensor) -> None:
        """A round, before it is committed, and the logits [1 + len(draft), V] that it was judged by. Rounds that ran ahead on
        a device are not seen: they are coupled, and the text alone proves them."""
        ...

    def finished(self, sequence: Sequence) -> None:
        """It ended, or was cancelled."""
        ...
