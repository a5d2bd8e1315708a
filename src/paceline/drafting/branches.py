"""The bytes of draft branches and of draft distributions on the wire.

`pack` packs branches of one length, with numbers of fixed width. A branch of n tokens is its accepted count (8 bits), the token
that follows, and the n tokens drafted after it. Tokens have 16 bits, or 32 for large vocabularies. All numbers are
little-endian. n is 0 while the branch is being drafted.

A `DraftDistribution` is a draft's distribution `q`, small enough to send: the most likely tokens with integer weights. The
token is sampled from the quantised `q`, so rejection stays exact: q(x) = weight(x) / 2^14 is a float32 without rounding.
Encoded: a count (16 bits), then five bytes per entry, token (24 bits) and weight (16 bits), little-endian.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.speculation.distribution import log_distribution
from paceline.speculation.rows import Purpose, RowContext, gumbel_at
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import SequenceBranches

MAX_NARROW = 1 << 16


class BranchKey(NamedTuple):
    """Outcome of a verification: the number of accepted drafts, and the token that follows them."""

    accepted: int
    token: int


@lru_cache(maxsize=256)
def _layout(length: int, is_wide: bool) -> Struct:
    return Struct(f"<B{1 + length}{'I' if is_wide else 'H'}")


def pack(sequence: int, round_: int, branches: Iterable[tuple[BranchKey, Sequence[int]]]) -> list[SequenceBranches]:
    """One record for each length among `branches`, which are outcomes, each with the tokens drafted after it."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for key, tokens in branches:
        by_length.setdefault(len(tokens), []).append((*key, *tokens))
    packed = []
    for length, rows in by_length.items():
        is_wide = max(max(row[1:]) for row in rows) >= MAX_NARROW
        write = _layout(length, is_wide).pack
        packed.append(SequenceBranches(sequence, round_, b"".join([write(*row) for row in rows]), length, is_wide))
    return packed


def unpack(record: SequenceBranches) -> list[tuple[BranchKey, list[int]]]:
    """All branches of a record. Raises `MalformedMessage`."""
    layout = _layout(record.length, record.is_wide)
    if len(record.packed) % layout.size:
        raise MalformedMessage(f"{len(record.packed)} bytes are not a multiple of the branch size {layout.size}")
    return [(BranchKey(accepted, token), tokens) for accepted, token, *tokens in layout.iter_unpack(record.packed)]


MAX_TOKENS = 96
"""Tokens per distribution. Seven distributions stay below 3.4 KB."""
TOTAL_WEIGHT = 1 << 14
MAX_VOCABULARY = 1 << 24

_COUNT = np.dtype("<u2")
_ENTRY = np.dtype([("low", "<u2"), ("high", "u1"), ("weight", "<u2")])


class DraftDistribution(NamedTuple):
    tokens: Tensor  # [M] int64, M <= MAX_TOKENS, most likely first
    weights: Tensor  # [M] int64, positive, sum TOTAL_WEIGHT


def sample(logits: Tensor, rows: Sequence[RowContext]) -> list[tuple[int, DraftDistribution]]:
    """A token for each row of logits [R, V], and the distribution that it was sampled from."""
    q = log_distribution(logits, rows).exp_()
    best = q.topk(min(MAX_TOKENS, q.shape[1]), dim=1)
    weights = _quantise(best.values)  # [R, M]
    noise = gumbel_at([row.key for row in rows], Purpose.DRAFT, best.indices)
    chosen = noise.add_(weights.to(torch.float32).log_()).argmax(1, keepdim=True)
    tokens: list[int] = best.indices.gather(1, chosen).squeeze(1).tolist()
    counts: list[int] = (weights > 0).sum(1).tolist()  # sorted: the positive weights are a prefix
    entries = zip(tokens, best.indices.cpu(), weights.cpu(), counts, strict=True)
    return [(token, DraftDistribution(ids[:count], kept[:count])) for token, ids, kept, count in entries]


def _quantise(probabilities: Tensor) -> Tensor:
    """[R, M] int64 weights of sum TOTAL_WEIGHT: rounded down, the remainder added to the most likely token."""
    shares = probabilities.to(torch.float64)
    weights = (shares / shares.sum(1, keepdim=True) * TOTAL_WEIGHT).floor().to(torch.int64)
    weights[:, 0] += TOTAL_WEIGHT - weights.sum(1)
    return weights


def encode(distributions: Sequence[DraftDistribution]) -> bytes:
    parts = []
    for distribution in distributions:
        entries = np.empty(len(distribution.tokens), _ENTRY)
        ids = distribution.tokens.numpy()
        entries["low"], entries["high"], entries["weight"] = ids & 0xFFFF, ids >> 16, distribution.weights.numpy()
        parts += [np.array(len(entries), _COUNT).tobytes(), entries.tobytes()]
    return b"".join(parts)


def decode(data: bytes, tokens: Sequence[int], vocab_size: int) -> list[DraftDistribution]:
    """The distributions of the chain `tokens`.

    Raises `MalformedMessage` unless each is a distribution over the vocabulary with a positive weight for its token.
    """
    distributions: list[DraftDistribution] = []
    start = 0
    for token in tokens:
        if start + _COUNT.itemsize > len(data):
            raise MalformedMessage(f"{len(distributions)} distributions for a chain of {len(tokens)} tokens")
        count = int(np.frombuffer(data, _COUNT, 1, start)[0])
        start += _COUNT.itemsize
        if not 0 < count <= MAX_TOKENS or start + count * _ENTRY.itemsize > len(data):
            raise MalformedMessage(f"a distribution of {count} tokens in {len(data) - start} bytes")
        entries = np.frombuffer(data, _ENTRY, count, start)
        start += count * _ENTRY.itemsize
        ids = entries["low"].astype(np.int64) | entries["high"].astype(np.int64) << 16
        weights = entries["weight"].astype(np.int64)
        if len(np.unique(ids)) != count or ids.max() >= vocab_size:
            raise MalformedMessage("a distribution with repeated tokens, or tokens outside the vocabulary")
        if weights.min() == 0 or weights.sum() != TOTAL_WEIGHT:
            raise MalformedMessage(f"a distribution with zero weights, or weights that do not sum to {TOTAL_WEIGHT}")
        if token not in ids:
            raise MalformedMessage(f"token {token} has no weight in its distribution")
        distributions.append(DraftDistribution(torch.from_numpy(ids), torch.from_numpy(weights)))
    if start != len(data):
        raise MalformedMessage(f"{len(data) - start} bytes after the last distribution")
    return distributions
