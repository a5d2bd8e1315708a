"""A tree grown best first, as in EAGLE-2, and the ranking of tokens at its rows.

The value of a node is the product of the confidences on its path. The value of a child is at most that of its parent. The best
nodes are therefore closed under parents, and a node outside the best has no descendant among them.

`rank` orders tokens at a row by the probability that the target picks them, as estimated by a draft. The pick of the target
depends on the rule. Greedy: its arg-max, so rank by log q. Coupled: argmax(log p + G) with noise G that is known beforehand, so
rank by log q + G. Rejection: rank by log q under the request's sampling parameters; a deterministic choice is one-hot and
exact. Confidences are the log-softmax of the ranked scores.

For a request with truncation only the `WIDTH` best tokens are ranked: a draft may be approximate.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.cpu.eagle_head import MAX_TREE_SLOTS, TreeRoot
from paceline.kernels.sampling import can_sample, rank_sampled, top_with_total
from paceline.models.heads import DraftVocabulary
from paceline.speculation import SequenceProgress
from paceline.speculation.distribution import sampled_row
from paceline.speculation.drafts import DraftTree
from paceline.speculation.rows import Purpose, RowContext, gumbel, gumbel_at, process
from paceline.speculation.verification import MAX_NODES


class Growth:
    """Candidate nodes of one sequence; the best `budget` become its draft."""

    def __init__(self, budget: int, max_levels: int | None = None) -> None:
        self.budget, self._max_levels = budget, max_levels
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._values: list[float] = []  # log of the product of confidences
        self._levels: list[int] = []

    def add(self, parent: int, branches: Iterable[tuple[int, float]]) -> range:
        """Add children of `parent` (-1: the root) as (token, log confidence). Returns their nodes; -inf is never drafted."""
        first = len(self.tokens)
        value, level = (self._values[parent], self._levels[parent]) if parent >= 0 else (0.0, 0)
        for token, confidence in branches:
            self.tokens.append(token)
            self.parents.append(parent)
            self._values.append(value + min(confidence, 0.0))
            self._levels.append(level + 1)
        return range(first, len(self.tokens))

    def frontier(self, level: int, width: int) -> list[int]:
        """At most `width` nodes of `level` whose children may be among the best, best first; at most `MAX_TREE_SLOTS` nodes of
        a tree get children."""
        if self._max_levels is not None and level >= self._max_levels:
            return []
        # If `budget` nodes, itself included, have at least its value, no child of it is among the best
        best = self._ranked(self.budget - 1)
        left = MAX_TREE_SLOTS + 1 - len({-1, *self.parents})
        return [node for node in best if self._levels[node] == level][: min(width, left)]

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`."""
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def draft(self) -> DraftTree:
        """The best `budget` nodes, best first: a prefix of them is the best smaller draft."""
        kept = [node for node in self._ranked(self.budget) if self._values[node] > -math.inf]
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return DraftTree(tuple(self.tokens[node] for node in kept), tuple(place[self.parents[node]] for node in kept))

    def _ranked(self, count: int) -> list[int]:
        """The best nodes. Equal values come in the order of creation, so that a parent precedes its children."""
        return heapq.nsmallest(count, range(len(self.tokens)), key=lambda node: (-self._values[node], node))


WIDTH = 256
Branches = list[tuple[int, float]]
"""(token, log confidence), best first."""


def draft_row(progress: SequenceProgress, path: tuple[int, ...]) -> RowContext:
    """The row after the committed tokens and `path`."""
    return RowContext(
        params=progress.sampling,
        seed=progress.seed,
        choice=progress.choice,
        position=len(progress.ids) + len(path),
        ids=progress.ids,
        num_prompt=progress.num_prompt,
        path=path,
    )


def tree_root(progress: SequenceProgress, blocks: Sequence[int], num_cached: int, max_levels: int) -> TreeRoot:
    """The root of a native tree, for a sequence with `num_cached` slots in `blocks`; it ranks as `rank` does."""
    row = sampled_row(draft_row(progress, ()))
    return TreeRoot(
        blocks=blocks,
        num_cached=num_cached,
        position=len(progress.ids) - 2,
        next_token=row.position,
        budget=min(progress.depth, MAX_NODES),
        max_levels=max_levels if progress.max_levels is None else min(max_levels, progress.max_levels),
        sampling=row.params,
        stream=row.stream,
        is_noisy=progress.verification == "coupled",
    )


def rank(
    logits: Tensor,  # [R, V'] float32 over the draft's vocabulary
    rows: Sequence[RowContext],
    is_coupled: Sequence[bool],
    vocabulary: DraftVocabulary | None,
    count: int,
) -> list[Branches]:
    """The `count` best tokens of each row; impossible tokens are left out. Without a vocabulary the columns of `logits` are the
    target's tokens."""
    ids = None if vocabulary is None else vocabulary.ids
    if any(row.is_processed for row in rows):
        # Penalties and biases use the target's ids
        logits, ids = process(logits if vocabulary is None else vocabulary.expand_logits(logits), rows), None
    columns, confidence = _best(logits, rows, is_coupled, ids, count)
    tokens = columns if ids is None else ids[columns]
    return [
        [(token, value) for token, value in zip(*pair, strict=True) if value > -torch.inf]
        for pair in zip(tokens.tolist(), confidence.tolist(), strict=True)
    ]


def _best(
    logits: Tensor, rows: Sequence[RowContext], is_coupled: Sequence[bool], ids: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    """(columns, log confidence), [R, count] each."""
    if can_sample(logits) and not any(row.params.is_greedy for row in rows):
        count = min(count, logits.shape[1])
        return rank_sampled(logits, [sampled_row(row) for row in rows], is_coupled, ids, count)
    return RankRules.of(rows, is_coupled, ids, logits).best(logits, count)


@dataclass(frozen=True, slots=True, eq=False)
class RankRules:
    """The parameters that rank R rows, as tensors: `best` reads no value on the host, so a device need not wait."""

    temperature: Tensor | None  # [R, 1]. None if it is 1 everywhere
    noise: Tensor | None  # [R, V'] or [1, V'], 0 for rows without
    top_k: Tensor | None  # [R, 1] int64. None if no row truncates
    top_p: Tensor | None  # [R, 1], above 1: off
    min_p: Tensor | None  # [R, 1] log; -inf: off

    @classmethod
    def of(
        cls, rows: Sequence[RowContext], is_coupled: Sequence[bool], ids: Tensor | None, like: Tensor
    ) -> "RankRules":
        """Rules for logits of the shape of `like` [R, V'], whose columns are the tokens `ids`."""
        device = like.device
        noisy = [coupled and not row.params.is_greedy for row, coupled in zip(rows, is_coupled, strict=True)]
        temperatures = [row.params.temperature or 1.0 for row in rows]
        temperature = top_k = top_p = min_p = None
        if any(value != 1.0 for value in temperatures):
            temperature = torch.tensor(temperatures, device=device).unsqueeze(1)
        cuts = [row.params if row.is_truncated and not row.params.is_greedy else None for row in rows]
        if any(cuts):
            width = like.shape[1]
            top_k = torch.tensor([cut.top_k or width if cut else width for cut in cuts], device=device).unsqueeze(1)
            shares = [cut.top_p if cut and cut.top_p < 1.0 else 2.0 for cut in cuts]
            top_p = torch.tensor(shares, device=device).unsqueeze(1)
            min_p = torch.tensor([cut.min_p if cut else 0.0 for cut in cuts], device=device).log_().unsqueeze(1)
        noise = _noise(rows, noisy, ids, like) if any(noisy) else None
        return cls(temperature, noise, top_k, top_p, min_p)

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """(columns, log confidence) of the `count` best, [R, count] each, best first; -inf: impossible."""
        columns = None
        if self.top_k is not None:
            scores, columns = self.truncated(logits)
        else:
            scores = self._scaled(logits)
        if self.noise is not None:
            noise = self.noise
            if columns is not None:
                noise = noise.expand(len(logits), -1).gather(1, columns)
            scores = scores + noise
        best, values, totals = top_with_total(scores, count)
        return best if columns is None else columns.gather(1, best), values - totals

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.temperature is None else logits / self.temperature

    def truncated(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(scores without noise, columns) of the best `WIDTH`; -inf outside min-p, then top-k, then top-p."""
        scores = self._scaled(logits)
        assert self.top_k is not None
        assert self.top_p is not None
        assert self.min_p is not None
        total = scores.logsumexp(1, keepdim=True)
        ranked, columns = scores.topk(min(WIDTH, scores.shape[1]), dim=1)
        place = torch.arange(ranked.shape[1], device=scores.device)
        keep = (ranked - ranked[:, :1] >= self.min_p) & (place < self.top_k)
        mass = (ranked - total).exp().masked_fill(~keep, 0.0)
        # top-p is a share of the mass kept by min-p and top-k; without those, of the whole distribution
        is_cut = (self.top_k < scores.shape[1]) | (self.min_p > -torch.inf)
        whole = torch.where(is_cut, mass.sum(1, keepdim=True), 1.0)
        keep &= mass.cumsum(1) - mass < self.top_p * whole
        return ranked.masked_fill(~keep, -torch.inf), columns


def _noise(rows: Sequence[RowContext], noisy: Sequence[bool], ids: Tensor | None, like: Tensor) -> Tensor:
    """G [R, V'] or [1, V']. It depends on the position: the nodes of a level share it."""
    keys = list(dict.fromkeys(row.key for row, is_noisy in zip(rows, noisy, strict=True) if is_noisy))
    if ids is None:
        noise = gumbel(keys, Purpose.SHARED, like.shape[1], like.device)
    else:
        noise = gumbel_at(keys, Purpose.SHARED, ids.expand(len(keys), -1))
    if len(keys) == 1 and all(noisy):
        return noise
    number = {key: i for i, key in enumerate(keys)}
    zeros = len(keys)  # index of a row of zeros
    index = [number[row.key] if is_noisy else zeros for row, is_noisy in zip(rows, noisy, strict=True)]
    return torch.cat((noise, noise.new_zeros(1, noise.shape[1])))[index]
