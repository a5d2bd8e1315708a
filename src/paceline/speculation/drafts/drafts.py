"""The output of a proposer: drafted tokens as tensors of a whole batch, and what drafting them cost.

Every draft is a tree of tokens; a chain is a tree with one child per node.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, eq=False)
class DraftProbs:
    """The distributions `q` that drafted tokens were sampled from, one row per node; for rejection sampling only.

    Dense rows have `ids=None` and one column per vocabulary entry. Sparse rows have token ids in addition to their
    probabilities; a column with probability 0 is padding. Siblings have the same row, that of their parent: they are drawn from
    it one after another without replacement.
    """

    probs: Tensor  # [N, V] or [N, M] float32, rows sum to 1
    ids: Tensor | None = None  # [N, M] int64

    def dense(self, rows: slice, vocab_size: int) -> Tensor:
        probs = self.probs[rows]
        if self.ids is None:
            return probs
        # scatter_add: padding with probability 0 must not overwrite a real entry
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
    behind: frozenset[int] = frozenset()
    """Sequences whose draft prefill is not complete. They get a draft in a later step."""


NO_COST = DraftCost()


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafted nodes of one sequence on the host: a parent precedes its children, -1 is the last committed token."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    expected: float = 0.0
    """Accepted tokens that the proposer expects."""

    def __len__(self) -> int:
        return len(self.tokens)

    def num_matched(self, committed: Sequence[int]) -> int:
        """The number of tokens of `committed` that a path from the root has."""
        node, count = -1, 0
        for child, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if count == len(committed):
                break
            if parent == node and token == committed[count]:
                node = child
                count += 1
        return count


@dataclass(frozen=True, slots=True, eq=False)
class DraftBatch:
    """Drafts of several sequences, ragged: sequence `sequence_ids[s]` has the next `counts[s]` nodes.

    `parents` are indices among the sequence's own nodes, -1 for a child of the last committed token. A parent precedes its
    children, and siblings have different tokens. `probs=None` means one-hot: the tokens were chosen deterministically, or by
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
        """A batch of chains from (sequence id, tokens) pairs; empty chains are left out."""
        pairs = [(sequence_id, tokens) for sequence_id, tokens in drafts if tokens]
        return cls(
            tuple(sequence_id for sequence_id, _ in pairs),
            tuple(len(tokens) for _, tokens in pairs),
            torch.tensor([token for _, tokens in pairs for token in tokens], dtype=torch.int64),
            torch.tensor([i - 1 for _, tokens in pairs for i in range(len(tokens))], dtype=torch.int64),
            probs,
            cost,
        )

    @classmethod
    def trees(cls, trees: Iterable[tuple[int, DraftTree]], cost: DraftCost = NO_COST) -> "DraftBatch":
        """A one-hot batch from (sequence id, tree) pairs; empty trees are left out."""
        return _HostTrees({sequence_id: tree for sequence_id, tree in trees if tree.tokens}, cost)

    def split(self) -> "dict[int, Draft]":
        """The drafts by sequence, with tokens and parents on the host."""
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        drafts, start = {}, 0
        for sequence_id, count in zip(self.sequence_ids, self.counts, strict=True):
            rows = slice(start, start + count)
            drafts[sequence_id] = Draft(tuple(tokens[rows]), tuple(parents[rows]), self.probs, rows)
            start += count
        return drafts


class _HostTrees(DraftBatch):
    """A one-hot batch on the host. Its tensors are made when they are read: that takes longer than a small tree."""

    __slots__ = ("_trees",)
    _trees: "dict[int, DraftTree]"

    def __init__(self, trees: "dict[int, DraftTree]", cost: DraftCost) -> None:
        fields = {
            "sequence_ids": tuple(trees),
            "counts": tuple([len(tree.tokens) for tree in trees.values()]),
            "probs": None,
            "cost": cost,
            "_trees": trees,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([token for tree in self._trees.values() for token in tree.tokens], dtype=torch.int64)

    @property
    def parents(self) -> Tensor:
        return torch.tensor([parent for tree in self._trees.values() for parent in tree.parents], dtype=torch.int64)

    def split(self) -> "dict[int, Draft]":
        return {sequence_id: Draft(tree.tokens, tree.parents) for sequence_id, tree in self._trees.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """The draft of one sequence in a `DraftBatch`."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: DraftProbs | None = None
    rows: slice = field(default_factory=lambda: slice(0, 0))
    """Rows of this draft in `probs`."""

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
        """Nodes whose parent is `node` (-1: the root), in draft order."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def q(self, vocab_size: int) -> Tensor | None:
        """The distributions [len, V] that the tokens were drawn from. None if they are one-hot."""
        return None if self.probs is None else self.probs.dense(self.rows, vocab_size)


def depths(parents: Sequence[int]) -> list[int]:
    """The level of each node: 1 for children of the last committed token."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    return levels


def merge_batches(batches: Sequence[DraftBatch]) -> DraftBatch:
    """All drafts of `batches`, which share no sequence, without a cost. If a batch has `q`, batches without it get one-hot
    rows."""
    batches = [batch for batch in batches if batch.sequence_ids]
    if not batches:
        return DraftBatch.empty()
    return DraftBatch(
        tuple(sequence_id for batch in batches for sequence_id in batch.sequence_ids),
        tuple(count for batch in batches for count in batch.counts),
        torch.cat([batch.tokens.cpu() for batch in batches]),
        torch.cat([batch.parents.cpu() for batch in batches]),
        _merge_probs(batches),
    )


def _merge_probs(batches: Sequence[DraftBatch]) -> DraftProbs | None:
    given = [batch.probs for batch in batches if batch.probs is not None]
    if not given:
        return None
    if len(batches) == 1:
        return given[0]
    device = given[0].probs.device
    rows = [batch.probs or _one_hot(batch.tokens, device) for batch in batches]
    dense = next((probs for probs in given if probs.ids is None), None)
    if dense is not None:
        vocab_size = dense.probs.shape[1]
        return DraftProbs(torch.cat([probs.dense(slice(None), vocab_size).to(device) for probs in rows]))
    width = max(probs.probs.shape[1] for probs in rows)
    ids = [pad(probs.ids, (0, width - probs.probs.shape[1])).to(device) for probs in rows if probs.ids is not None]
    return DraftProbs(
        torch.cat([pad(probs.probs, (0, width - probs.probs.shape[1])).to(device) for probs in rows]), torch.cat(ids)
    )


def _one_hot(tokens: Tensor, device: torch.device) -> DraftProbs:
    return DraftProbs(torch.ones(len(tokens), 1, device=device), tokens.to(device).unsqueeze(1))
