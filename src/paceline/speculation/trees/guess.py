"""A drafted tree of tokens on the host, before it becomes part of a batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.speculation.drafts import DraftBatch


@dataclass(frozen=True, slots=True)
class Guess:
    """Nodes in drafting order, as in `Draft`: a parent precedes its children, -1 is the last committed token."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    expected: float = 0.0
    """Tokens that the proposer itself expects to be accepted."""

    def __len__(self) -> int:
        return len(self.tokens)

    def matched(self, committed: Sequence[int]) -> int:
        """How many tokens of `committed`, which followed, this guess has from its root down."""
        node, count = -1, 0
        for child, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if count == len(committed):
                break
            if parent == node and token == committed[count]:
                node = child
                count += 1
        return count


def batch_of(guesses: Iterable[tuple[int, Guess]]) -> DraftBatch:
    """A batch from (sequence id, guess) pairs; empty guesses are left out. One-hot: no guess has a `q`."""
    pairs = [(sequence_id, guess) for sequence_id, guess in guesses if len(guess)]
    return DraftBatch(
        tuple(sequence_id for sequence_id, _ in pairs),
        tuple(len(guess) for _, guess in pairs),
        torch.tensor([token for _, guess in pairs for token in guess.tokens], dtype=torch.int64),
        torch.tensor([parent for _, guess in pairs for parent in guess.parents], dtype=torch.int64),
    )
