"""How well a draft guesses, offline: alpha by position and tokens a round, greedily, on text the target wrote.

A draft token counts only if all before it in its round were the target's own. So the guesses for every round, wherever
it starts, come from one pass over the text itself, and rounds are walked through afterwards.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.train.data.text import Text
from paceline.train.drafts.draft import Draft
from paceline.train.drafts.reduced_vocab import DraftVocabulary
from paceline.train.drafts.target import Target
from paceline.train.soft_loss import CHUNK_ELEMENTS

NEVER = 1 << 20
"""The rank of a token that a draft cannot guess."""
WIDEST = 16
"""Children of a tree node at the most."""

Path = tuple[int, ...]
"""A node of a tree by ranks: (0, 2) is the third guess after the first guess."""


@dataclass(frozen=True, slots=True)
class Score:
    tokens: int = 0
    rounds: int = 0
    accepted: tuple[int, ...] = ()
    """Per position of a round: how often it was accepted."""
    tried: tuple[int, ...] = ()
    """Per position: how often it was reached, all before it being accepted."""

    @property
    def tokens_a_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def alphas(self) -> tuple[float, ...]:
        return tuple(a / t if t else 0.0 for a, t in zip(self.accepted, self.tried, strict=True))

    def __add__(self, other: "Score") -> "Score":
        if not self.rounds or not other.rounds:
            return self if self.rounds else other
        accepted, tried = (
            tuple(a + b for a, b in zip(one, two, strict=True))
            for one, two in ((self.accepted, other.accepted), (self.tried, other.tried))
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
) -> Evaluation:
    """`rows` rows of text are scored at a time. The tree is the best one for this very text, and fixed over it."""
    head = vocabulary.head(target.head)
    was_training = draft.training
    draft.eval()
    parts = []
    for start in range(0, len(text), rows):
        ids, answer = text.ids[start : start + rows], text.answer[start : start + rows]
        # What lies behind the last answer is not needed; rows without any are as long as a round
        used = max([depth + 2, *(1 + answer.any(0).nonzero()[:, 0]).tolist()])
        found = round_ranks(token_ranks(draft, target, head, vocabulary, ids[:, :used], depth), draft, depth)
        parts.append(F.pad(found, (0, ids.shape[1] - found.shape[2]), value=NEVER))
    ranks = torch.cat(parts, 1)  # [U, N, S]
    draft.train(was_training)
    paths = best_tree(rank_frequencies(ranks, text.answer), nodes)
    chain, tree = ({kind: Score() for kind in sorted(set(text.kinds))} for _ in range(2))
    straight = {(0,) * d for d in range(1, len(ranks) + 1)}
    for row, kind in enumerate(text.kinds):
        of_row = ranks[:, row].tolist()
        for start, end in answers(text.answer[row]):
            chain[kind] += walk(of_row, start, end, straight)
            tree[kind] += walk(of_row, start, end, paths)
    asked = [kind for kind, score in chain.items() if score.rounds]
    return Evaluation({kind: chain[kind] for kind in asked}, {kind: tree[kind] for kind in asked}, nodes)


@torch.no_grad()
def token_ranks(
    draft: Draft, target: Target, head: Tensor, vocabulary: DraftVocabulary, ids: Tensor, depth: int
) -> Tensor:
    """[U, B, S]: row j, at depth u, ranks token j+1 as its guess number …, 0 being the best."""
    device = target.device
    ids = ids.to(device).long()
    states = target.states(ids, draft.capture)
    with torch.autocast(device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        guesses = draft.guess(target, states, depth)
    ranks = torch.full(guesses.hidden.shape[:3], NEVER, dtype=torch.int64, device=device)
    following = ids[:, 1:]
    known, wanted = vocabulary.contains(following).flatten(), vocabulary.to_draft(following).flatten()
    rows = max(1, CHUNK_ELEMENTS // len(head))
    for u, first in enumerate(guesses.first):
        hidden = guesses.hidden[u, :, :-1].flatten(0, 1).to(head.dtype)
        found = torch.empty_like(wanted)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = (hidden[part] @ head.T).float()
            found[part] = (logits > logits.gather(1, wanted[part, None])).sum(1)
        found = found.masked_fill(~known, NEVER).view(following.shape)
        ranks[u, :, first:-1] = found[:, first:]
    return ranks.cpu()


def round_ranks(ranks: Tensor, draft: Draft, depth: int) -> Tensor:
    """[U, B, S] by row to [U, B, S] by round: entry p is the round whose last committed token is at p."""
    if draft.same_at_every_depth:
        ranks = ranks.expand(depth, -1, -1)
    by_round = torch.full_like(ranks, NEVER, memory_format=torch.contiguous_format)
    for u in range(len(ranks)):
        by_round[u, :, : ranks.shape[2] - u] = ranks[u, :, u:]
    return by_round


def answers(answer: Tensor) -> Iterator[tuple[int, int]]:
    """[start, end) of every run of answer tokens in a row."""
    edges = torch.diff(answer.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero()[:, 0].tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


def walk(ranks: Sequence[Sequence[int]], start: int, end: int, paths: set[Path]) -> Score:
    """Round after round over the answer [start, end), whose first token the prompt's own pass gave. `ranks` [U][S]."""
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
    """[U][WIDEST]: how often the right token has each rank, over all rounds that could start in an answer."""
    started = answer & answer.roll(-1, 1)
    frequencies = []
    for at_depth in ranks:
        values = at_depth[started]
        counts = torch.bincount(values[values < WIDEST], minlength=WIDEST)
        frequencies.append((counts / max(1, len(values))).tolist())
    return frequencies


def best_tree(frequencies: Sequence[Sequence[float]], nodes: int) -> set[Path]:
    """The `nodes` paths most likely to be right, taking depths as independent. A prefix is as likely as what follows it,
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
