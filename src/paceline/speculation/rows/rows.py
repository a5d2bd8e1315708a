"""One row of logits: the parameters of its distribution, and the modifications of its raw logits.

The modifications hold also for greedy rows, in this order: logit bias, penalties, grammar mask, `min_tokens`. The order is
vLLM's. The repetition penalty covers prompt and output; presence and frequency penalties count output alone. Drafted tokens
before a row count as output: if the row is used, they are.

The arithmetic is defined to the bit, because the kernels of `kernels/gpu/speculation/edits.py` do the same: parameters are
rounded to float32. The repetition penalty divides as IEEE says, without a reciprocal. The amount of the other two penalties is
computed in float64, where the product of a count and a float32 is exact, and rounded to float32 once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.speculation.drafts import Draft, depths
from paceline.speculation.rows.noise import NoiseKey


class Facts(Protocol):
    """The attributes of a sequence that a row needs; `Sequence` and `Progress` have them."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def num_prompt(self) -> int: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def choice(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """The row predicts the token at absolute `position`, after `ids` and then `path`."""

    params: SamplingParams
    seed: int
    choice: int
    position: int
    ids: Sequence[int]
    """Committed tokens, a live view."""
    num_prompt: int
    path: tuple[int, ...] = ()
    """Drafted tokens between the last committed token and this row."""
    mask: Tensor | None = None
    """[ceil(V / 32)] int32, bit t of word t // 32: a grammar allows token t."""

    @property
    def key(self) -> NoiseKey:
        return NoiseKey(self.seed, self.choice, self.position)

    @property
    def is_processed(self) -> bool:
        """Whether its logits are modified before temperature and truncation."""
        params = self.params
        return params.has_penalties or bool(params.logit_bias) or self.mask is not None or self.is_ending_blocked

    @property
    def is_ending_blocked(self) -> bool:
        """Whether the end tokens are excluded, because the output is shorter than `min_tokens`."""
        return self.position - self.num_prompt < self.params.min_tokens and bool(self.params.blocked_ids)

    @property
    def is_truncated(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0


def row_contexts(facts: Facts, draft: Draft, masks: Sequence[Tensor] | None = None) -> tuple[RowContext, ...]:
    """The 1 + len(draft) rows of a sequence: after its last committed token, then after each node of its draft."""
    end = len(facts.ids)
    if not draft.tokens:  # most rows of a large batch
        mask = None if masks is None else masks[0]
        return (RowContext(facts.sampling, facts.seed, facts.choice, end, facts.ids, facts.num_prompt, (), mask),)
    paths: list[tuple[int, ...]] = [()]  # path of each row: of the root, then of each node
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    levels = (0, *depths(draft.parents))
    return tuple(
        RowContext(
            facts.sampling,
            facts.seed,
            facts.choice,
            end + level,
            facts.ids,
            facts.num_prompt,
            path,
            None if masks is None else masks[row],
        )
        for row, (level, path) in enumerate(zip(levels, paths, strict=True))
    )


def process(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    """[R, V] float32. `logits` is not modified; it is returned itself if no row needs a modification."""
    edited = [i for i, row in enumerate(rows) if row.is_processed]
    if not edited:
        return logits.to(torch.float32)
    result = logits.to(torch.float32, copy=True)
    committed: dict[int, NDArray[np.int64]] = {}  # rows of one sequence share their `ids`
    biases: dict[int, tuple[Tensor, Tensor]] = {}  # and their parameters
    for i in edited:
        row, scores = rows[i], result[i]
        if row.params.logit_bias:
            key = id(row.params.logit_bias)
            if key not in biases:
                biases[key] = _bias(row.params.logit_bias, scores)
            tokens, values = biases[key]
            scores[tokens] += values
        if row.params.has_penalties:
            ids = committed.setdefault(id(row.ids), np.asarray(row.ids, dtype=np.int64))
            _penalise(scores, row, np.concatenate((ids, np.asarray(row.path, dtype=np.int64))))
        if row.mask is not None:
            scores.masked_fill_(~allowed(row.mask.to(scores.device), len(scores)), -torch.inf)
        if row.is_ending_blocked:
            _block(scores, row.params.blocked_ids)
    return result


def allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """[V] bool from an int32 bitmask."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.unsqueeze(1) >> bits) & 1).to(torch.bool).flatten()[:vocab_size]


def _bias(bias: Mapping[int, float], scores: Tensor) -> tuple[Tensor, Tensor]:
    """The biased tokens of the vocabulary and their biases."""
    tokens = np.fromiter(bias.keys(), np.int64, len(bias))
    values = np.fromiter(bias.values(), np.float32, len(bias))
    is_known = (tokens >= 0) & (tokens < len(scores))
    return torch.from_numpy(tokens[is_known]).to(scores.device), torch.from_numpy(values[is_known]).to(scores.device)


def _block(scores: Tensor, tokens: Sequence[int]) -> None:
    """Exclude these tokens, unless a grammar allows no other tokens."""
    index = torch.tensor([token for token in tokens if token < len(scores)], dtype=torch.int64, device=scores.device)
    old = scores[index]
    scores[index] = -torch.inf
    if not bool(scores.isfinite().any()):
        scores[index] = old


def _penalise(scores: Tensor, row: RowContext, ids: NDArray[np.int64]) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(ids)).to(scores.device)
        old = scores[seen]
        # HAZARD: a GPU multiplies by the reciprocal of a Python number
        penalty = torch.full((), params.repetition_penalty, dtype=torch.float32, device=scores.device)
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        tokens, counts = np.unique(ids[row.num_prompt :], return_counts=True)
        presence, frequency = np.float32(params.presence_penalty), np.float32(params.frequency_penalty)
        amount = (np.float64(presence) + np.float64(frequency) * counts).astype(np.float32)
        scores[torch.from_numpy(tokens).to(scores.device)] -= torch.from_numpy(amount).to(scores.device)
