"""The one interface of every way to guess."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Verification
from paceline.speculation.drafts import DraftBatch


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """What a proposer learns about one sequence after a commit."""

    sequence_id: int
    ids: Sequence[int]
    """All committed tokens, prompt included. A live view: read it, never keep a copy of it or write to it."""
    depth: int
    """How many tokens to draft next; 0 asks for nothing and should cost nothing."""
    sampling: SamplingParams
    seed: int
    choice: int
    num_prompt: int
    verification: Verification
    cache_salt: str = ""
    """Sequences with different salts share no cached prefix, in a draft's cache either."""


class Proposer(Protocol):
    """Guesses the next tokens. State per sequence is the proposer's own business and ends with `close`.

    A proposer may answer with fewer tokens than asked for, or none. Whatever it answers, the text stays the target's: it can
    cost speed, never correctness, provided `DraftBatch.probs` are what its tokens were really drawn from.
    """

    def observe(self, batch: Sequence[Progress]) -> None:
        """Hear what was committed and what is wanted next; may start work, must not block on it."""
        ...

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        """Drafts for those of `sequence_ids` that are ready by `deadline` (seconds on the engine's clock)."""
        ...

    def close(self, sequence_ids: Sequence[int]) -> None:
        """Forget these sequences and free what they held."""
        ...
