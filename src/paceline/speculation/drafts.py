"""The output of a proposer: drafted tokens as tensors of a whole batch, and what drafting them cost."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The distributions `q` that drafted tokens were really sampled from, one row per node; rejection sampling only.

    Dense rows have `ids=None` and one column per vocabulary entry. Sparse rows list token ids beside their probabilities;
    a column with probability 0 is padding. Siblings carry their parent's distribution, all the same: they are drawn from it
    one after the other without replacement.
    """

    probs: Tensor  # [N, V] or [N, M] float32, rows sum to 1
    ids: Tensor | None = None  # [N, M] int64

    def dense(self, rows: slice, vocab_size: int) -> Tensor:
        probs = self.probs[rows]
        if self.ids is None:
            return probs
        # scatter_add, so that zero-probability padding cannot overwrite a real entry
        return torch.zeros(len(probs), vocab_size, device=probs.device).scatter_add_(1, self.ids[rows], probs)


@dataclass(frozen=True, slots=True)
class DraftPrefill:
    """Tokens that a proposer brought into its own cache before it could draft, and the seconds that it took."""

    tokens: int = 0
    """Tokens computed or found in the cache."""
    seconds: float = 0.0

    def __add__(self, other: "DraftPrefill") -> "DraftPrefill":
        return DraftPrefill(self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The parts of a `collect` call that are not drafting."""

    prefill: DraftPrefill = DraftPrefill()
    network_seconds: float = 0.0
    """Seconds spent waiting for the network."""


NO_COST = DraftCost()


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Drafts of several sequences, ragged: sequence `sequence_ids[s]` owns the next `counts[s]` nodes.

    `parents` are indices among the sequence's own nodes, -1 for a child of the last committed token; a parent precedes its
    children, and siblings differ in their token. `probs=None` means one-hot: the token was chosen deterministically, or by
    noise that verification shares.
    """

    sequence_ids: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: Tensor  # [N] int64
    parents: Tensor  # [N] int64
    probs: DraftProbs | None = None
    cost: DraftCost = NO_COST

    def __post_init__(self) -> None:
        if not (
            len(self.sequence_ids) == len(self.counts) and sum(self.counts) == len(self.tokens) == len(self.parents)
        ):
            raise ValueError("sequence_ids, counts, tokens and parents disagree in length")

    @classmethod
    def empty(cls, cost: DraftCost = NO_COST) -> "DraftBatch":
        nothing = torch.empty(0, dtype=torch.int64)
        return cls((), (), nothing, nothing, cost=cost)

    @classmethod
    def chains(
        cls, drafts: Iterable[tuple[int, list[int]]], probs: DraftProbs | None = None, cost: DraftCost = NO_COST
    ) -> "DraftBatch":
        """A batch of chains from (sequence id, tokens) pairs."""
        pairs = [(sequence_id, tokens) for sequence_id, tokens in drafts if tokens]
        return cls(
            tuple(sequence_id for sequence_id, _ in pairs),
            tuple(len(tokens) for _, tokens in pairs),
            torch.tensor([token for _, tokens in pairs for token in tokens], dtype=torch.int64),
            torch.tensor([i - 1 for _, tokens in pairs for i in range(len(tokens))], dtype=torch.int64),
            probs,
            cost,
        )

    def split(self) -> "dict[int, Draft]":
        """The same drafts, one value per sequence, tokens and parents on the host."""
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        drafts, start = {}, 0
        for sequence_id, count in zip(self.sequence_ids, self.counts, strict=True):
            rows = slice(start, start + count)
            drafts[sequence_id] = Draft(tuple(tokens[rows]), tuple(parents[rows]), self.probs, rows)
            start += count
        return drafts


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """One sequence's share of a `DraftBatch`."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: DraftProbs | None = None
    rows: slice = field(default_factory=lambda: slice(0, 0))
    """Where this draft's rows lie in `probs`."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`, inclusive; empty for the root (-1)."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def children(self, node: int) -> list[int]:
        """Nodes whose parent is `node` (-1: the root), in drafting order."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def q(self, vocab_size: int) -> Tensor | None:
        """[len, V] distributions the tokens were drawn from, None for one-hot."""
        return None if self.probs is None else self.probs.dense(self.rows, vocab_size)
