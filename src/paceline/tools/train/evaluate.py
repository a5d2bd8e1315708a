"""Offline scores of a draft on text of the target: alpha by position and tokens per round.

A draft token counts only if all before it in its round were accepted. So one pass over the text gives the predictions of
every possible round; the rounds are replayed afterwards.

Sampled text is scored as under coupled verification: the draft's tokens are ranked with the noise that made the target choose
its token. That noise is drawn from its distribution given the token.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.tools.train.drafts import Draft
from paceline.tools.train.layers import DraftVocabulary
from paceline.tools.train.loss import CHUNK_ELEMENTS
from paceline.tools.train.target import Target
from paceline.tools.train.text_files import Text

NO_RANK = 1 << 20
"""Rank of a token outside the draft's vocabulary."""
WIDEST = 16
"""Most children of a tree node."""

Path = tuple[int, ...]
"""A tree node by ranks: (0, 2) is the third-best token after the best token."""


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over the rounds of some text."""

    tokens: int = 0
    rounds: int = 0
    accepted: tuple[int, ...] = ()
    """Acceptances per position of a round."""
    tried: tuple[int, ...] = ()
    """Trials per position, which are the rounds in which all positions before it were accepted."""

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def alphas(self) -> tuple[float, ...]:
        return tuple(a / t if t else 0.0 for a, t in zip(self.accepted, self.tried, strict=True))

    def __add__(self, other: "Score") -> "Score":
        if not self.rounds or not other.rounds:
            return self if self.rounds else other
        accepted, tried = (
            tuple(a + b for a, b in zip(left, right, strict=True))
            for left, right in ((self.accepted, other.accepted), (self.tried, other.tried))
        )
        return Score(self.tokens + other.tokens, self.rounds + other.rounds, accepted, tried)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores by category, of a chain and of the best fixed tree of `nodes` nodes."""

    chain: Mapping[str, Score]
    tree: Mapping[str, Score]
    nodes: int

    @property
    def chain_overall(self) -> Score:
        return sum(self.chain.values(), Score())

    @property
    def tree_overall(self) -> Score:
        return sum(self.tree.values(), Score())


def evaluate(
    draft: Draft,
    target: Target,
    vocabulary: DraftVocabulary,
    text: Text,
    depth: int = 5,
    nodes: int = 32,
    rows: int = 8,
    temperature: float = 0.0,
) -> Evaluation:
    """Score a draft, `rows` rows at a time, on answers of one temperature, 0 or 1. The tree is the best fixed one for this
    text."""
    head = vocabulary.head(target.head)
    was_training = draft.training
    draft.eval()
    parts = []
    for start in range(0, len(text), rows):
        ids, answer = text.ids[start : start + rows], text.answer[start : start + rows]
        # Tokens after the last answer are not needed; rows without an answer have the length of a round.
        used = max([depth + 2, *(1 + answer.any(0).nonzero()[:, 0]).tolist()])
        needed = answer[:, :used].clone()
        for later in range(1, depth + 1):  # a round may reach over the end of an answer
            needed[:, later:] |= answer[:, : used - later]
        found = token_ranks(draft, target, head, vocabulary, ids[:, :used], depth, needed, temperature)
        found = round_ranks(found, draft, depth)
        parts.append(F.pad(found, (0, ids.shape[1] - found.shape[2]), value=NO_RANK))
    ranks = torch.cat(parts, 1)  # [U, N, S]
    draft.train(was_training)
    paths = best_tree(rank_frequencies(ranks, text.answer), nodes)
    chain, tree = ({kind: Score() for kind in sorted(set(text.kinds))} for _ in range(2))
    chain_paths = {(0,) * d for d in range(1, len(ranks) + 1)}
    for row, kind in enumerate(text.kinds):
        of_row = ranks[:, row].tolist()
        for start, end in answers(text.answer[row]):
            chain[kind] += replay(of_row, start, end, chain_paths)
            tree[kind] += replay(of_row, start, end, paths)
    scored = [kind for kind, score in chain.items() if score.rounds]
    return Evaluation({kind: chain[kind] for kind in scored}, {kind: tree[kind] for kind in scored}, nodes)


@torch.no_grad()
def token_ranks(
    draft: Draft,
    target: Target,
    head: Tensor,
    vocabulary: DraftVocabulary,
    ids: Tensor,
    depth: int,
    needed: Tensor | None = None,
    temperature: float = 0.0,
) -> Tensor:
    """[U, B, S]: the rank of token j+1 in the prediction of row j at depth u, where 0 is the best. `needed` [B, S] selects
    tokens. The remaining tokens have NO_RANK."""
    device = target.device
    ids = ids.to(device).long()
    states = draft.states(target, ids)
    with torch.autocast(device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        predictions = draft.predict(target, states, depth)
    ranks = torch.full(predictions.hidden.shape[:3], NO_RANK, dtype=torch.int64, device=device)
    following = ids[:, 1:]
    known, all_wanted = vocabulary.contains(following).flatten(), vocabulary.to_draft(following).flatten()
    if needed is not None:
        known = known & needed[:, 1:].to(device).flatten()
    chosen = known.nonzero()[:, 0]
    wanted = all_wanted[chosen]
    hidden = predictions.hidden[:, :, :-1].flatten(1, 2)[:, chosen]  # [U, n, D]
    last = target.states(ids).last[:, :-1].flatten(0, 1)[chosen] if temperature else None
    draw = torch.Generator(device).manual_seed(0)
    found = torch.empty(hidden.shape[:2], dtype=torch.int64, device=device)
    rows = max(1, CHUNK_ELEMENTS // len(target.head))
    for start in range(0, len(wanted), rows):
        part = slice(start, start + rows)
        noise: Tensor | float = 0.0
        if last is not None:  # the same at every depth
            p_logits = (last[part] @ target.head.T).float()
            inside = p_logits if vocabulary.ids is None else p_logits[:, vocabulary.ids.to(device)]
            noise = coupled_noise(inside, p_logits.logsumexp(-1, keepdim=True), wanted[part], draw)
        for u in range(len(hidden)):
            logits = (hidden[u, part].to(head.dtype) @ head.T).float() + noise
            found[u, part] = (logits > logits.gather(1, wanted[part, None])).sum(1)
    for u, first in enumerate(predictions.first):
        placed = torch.full_like(all_wanted, NO_RANK)
        placed[chosen] = found[u]
        ranks[u, :, first:-1] = placed.view(following.shape)[:, first:]
    return ranks.cpu()


def coupled_noise(logits: Tensor, total: Tensor, tokens: Tensor, draw: torch.Generator) -> Tensor:
    """[n, Vd]: Gumbel noise of some tokens' `logits` [n, Vd], given that it made `tokens` [n] the arg-maxes of logits + noise.

    The maximum is a Gumbel variable around `total` [n, 1], the logsumexp of the logits of all tokens, whichever token has it.
    The sums of the remaining tokens are Gumbel variables cut off at the maximum.
    """
    maximum = total + _gumbel(total, draw)
    sums = -torch.logaddexp(-maximum, -(logits + _gumbel(logits, draw)))
    return sums.scatter(1, tokens[:, None], maximum) - logits


def _gumbel(like: Tensor, draw: torch.Generator) -> Tensor:
    return -torch.empty_like(like).exponential_(generator=draw).log()


def round_ranks(ranks: Tensor, draft: Draft, depth: int) -> Tensor:
    """[U, B, S] by row to [U, B, S] by round: entry p is the round with the last committed token at p."""
    if draft.is_same_at_every_depth:
        ranks = ranks.expand(depth, -1, -1)
    by_round = torch.full_like(ranks, NO_RANK, memory_format=torch.contiguous_format)
    for u in range(len(ranks)):
        by_round[u, :, : ranks.shape[2] - u] = ranks[u, :, u:]
    return by_round


def answers(answer: Tensor) -> Iterator[tuple[int, int]]:
    """[start, end) of every run of answer tokens in a row."""
    edges = torch.diff(answer.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()[:, 0].tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def replay(ranks: Sequence[Sequence[int]], start: int, end: int, paths: set[Path]) -> Score:
    """Replay the rounds of the answer [start, end). The prefill gives its first token. `ranks` [U][S]."""
    depth = len(ranks)
    accepted, tried = [0] * depth, [0] * depth
    last, rounds = start, 0
    while last < end - 1:
        rounds += 1
        path: Path = ()
        while len(path) < min(depth, end - 1 - last):
            tried[len(path)] += 1
            longer = (*path, ranks[len(path)][last])
            if longer not in paths:
                break
            accepted[len(path)] += 1
            path = longer
        last = min(last + len(path) + 1, end - 1)
    return Score(max(0, end - 1 - start), rounds, tuple(accepted), tuple(tried))


def rank_frequencies(ranks: Tensor, answer: Tensor) -> list[list[float]]:
    """[U][WIDEST]: frequency of each rank of the target's token, over all rounds that can start in an answer."""
    started = answer & answer.roll(-1, 1)
    frequencies = []
    for at_depth in ranks:
        values = at_depth[started]
        counts = torch.bincount(values[values < WIDEST], minlength=WIDEST)
        frequencies.append((counts / max(1, len(values))).tolist())
    return frequencies


def best_tree(frequencies: Sequence[Sequence[float]], nodes: int) -> set[Path]:
    """The `nodes` most likely paths, with depths taken as independent. A prefix is at least as likely as its continuations,
    so the set is a tree."""
    queue: list[tuple[float, Path]] = [(-1.0, ())]
    chosen: set[Path] = set()
    while queue and len(chosen) <= nodes:
        value, path = heapq.heappop(queue)
        chosen.add(path)
        if len(path) < len(frequencies):
            for rank, frequency in enumerate(frequencies[len(path)]):
                heapq.heappush(queue, (value * frequency, (*path, rank)))
    return chosen - {()}
