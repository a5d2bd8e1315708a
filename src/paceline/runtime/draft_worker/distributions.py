"""What drafted tokens were drawn from, small enough to send: the likeliest tokens with integer weights.

A law is quantised first and the token drawn from exactly that, so rejection stays exact: q(x) = weight(x) / 2^14, a float32
without rounding. On the wire a law is a count (16 bits), then five bytes an entry: token (24) and weight (16), little-endian.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.runtime.wire.codec import Malformed
from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.noise import Purpose, gumbel_at
from paceline.speculation.verification.rows import RowContext

WIDTH = 96
"""Tokens of a law at most: 7 laws stay below 3.4 KB."""
TOTAL = 1 << 14
MAX_VOCABULARY = 1 << 24

_COUNT = np.dtype("<u2")
_ENTRY = np.dtype([("low", "<u2"), ("high", "u1"), ("weight", "<u2")])


class Law(NamedTuple):
    tokens: Tensor  # [M] int64, M <= WIDTH, likeliest first
    weights: Tensor  # [M] int64, positive, summing to TOTAL


def draw(logits: Tensor, rows: Sequence[RowContext]) -> list[tuple[int, Law]]:
    """A token for each row of logits [R, V], and the law it was drawn from."""
    q = log_distribution(logits, rows).exp_()
    best = q.topk(min(WIDTH, q.shape[1]), dim=1)
    weights = _quantise(best.values)  # [R, M]
    noise = gumbel_at([row.key for row in rows], Purpose.DRAFT, best.indices)
    chosen = noise.add_(weights.to(torch.float32).log_()).argmax(1, keepdim=True)
    tokens: list[int] = best.indices.gather(1, chosen).squeeze(1).tolist()
    counts: list[int] = (weights > 0).sum(1).tolist()  # best first: what has any weight is a prefix
    entries = zip(tokens, best.indices.cpu(), weights.cpu(), counts, strict=True)
    return [(token, Law(ids[:count], kept[:count])) for token, ids, kept, count in entries]


def _quantise(probabilities: Tensor) -> Tensor:
    """[R, M] int64 weights that sum to TOTAL. Rounded down, the likeliest token takes what is left over."""
    shares = probabilities.to(torch.float64)
    weights = (shares / shares.sum(1, keepdim=True) * TOTAL).floor().to(torch.int64)
    weights[:, 0] += TOTAL - weights.sum(1)
    return weights


def encode(laws: Sequence[Law]) -> bytes:
    parts = []
    for law in laws:
        entries = np.empty(len(law.tokens), _ENTRY)
        ids = law.tokens.numpy()
        entries["low"], entries["high"], entries["weight"] = ids & 0xFFFF, ids >> 16, law.weights.numpy()
        parts += [np.array(len(entries), _COUNT).tobytes(), entries.tobytes()]
    return b"".join(parts)


def decode(data: bytes, tokens: Sequence[int], vocab_size: int) -> list[Law]:
    """The laws of a chain. `Malformed` unless each is a distribution over the vocabulary that its token can come from."""
    laws: list[Law] = []
    start = 0
    for token in tokens:
        if start + _COUNT.itemsize > len(data):
            raise Malformed(f"{len(laws)} laws for a chain of {len(tokens)}")
        count = int(np.frombuffer(data, _COUNT, 1, start)[0])
        start += _COUNT.itemsize
        if not 0 < count <= WIDTH or start + count * _ENTRY.itemsize > len(data):
            raise Malformed(f"a law of {count} tokens in {len(data) - start} bytes")
        entries = np.frombuffer(data, _ENTRY, count, start)
        start += count * _ENTRY.itemsize
        ids = entries["low"].astype(np.int64) | entries["high"].astype(np.int64) << 16
        weights = entries["weight"].astype(np.int64)
        if len(np.unique(ids)) != count or ids.max() >= vocab_size or weights.min() == 0 or weights.sum() != TOTAL:
            raise Malformed("a law that is no distribution over the vocabulary")
        if token not in ids:
            raise Malformed(f"token {token} cannot come from its law")
        laws.append(Law(torch.from_numpy(ids), torch.from_numpy(weights)))
    if start != len(data):
        raise Malformed(f"{len(data) - start} bytes after the last law")
    return laws
