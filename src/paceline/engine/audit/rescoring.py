"""Rescoring: a finished text is computed again by plain decoding, from its first token on.

It reads nothing that speculation wrote: it has its own cache blocks. Where the passes of a runner have equal bits, a token is
the pick. Elsewhere it is the pick, or its score is within rounding of the pick's (`rounding`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import InvalidRequest
from paceline.core.request import SamplingParams
from paceline.engine.step.step import PICKING_BYTES
from paceline.kernels.cpu import native
from paceline.models.runner import ModelRunner, Span
from paceline.requests import Grammar
from paceline.speculation.distribution import log_distribution, pick
from paceline.speculation.rows import Purpose, RowContext, gumbel_at, process

SORT_BYTES = 40
"""Memory for picking from one logit, most of it for sorting."""
FLOAT32_GAP = 1e-4
"""Difference of logits that another order of summation may produce."""
STEPS = 2.0
"""Difference for smaller types, in units of the last place of the largest logit: one for each of two scores."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedText:
    """A text and all parameters that determine it."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    choice: int = 0
    grammar: Grammar | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.output_ids


@dataclass(frozen=True, slots=True, eq=False)
class Rescored:
    """Output tokens `first`, `first + 1`, …, and the rows that predict them."""

    first: int
    tokens: tuple[int, ...]
    logits: Tensor  # [len(tokens), V]
    rows: tuple[RowContext, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """An output token that plain decoding would not have picked."""

    index: int
    token: int
    pick: int
    gap: float
    """Distance of its score below the pick's, in units of logits; inf: the token was impossible."""
    is_rounding: bool
    """Whether it is within rounding."""


class Rescoring:
    """Rescores one text, a few rows per pass. It writes to `blocks` of the runner's cache, which must hold the text."""

    def __init__(self, text: FinishedText, runner: ModelRunner, blocks: Sequence[int]) -> None:
        self._text, self._ids, self._runner, self._blocks = text, text.ids, runner, blocks
        self._state = text.grammar.start() if text.grammar else None
        self._computed = 0

    @property
    def is_done(self) -> bool:
        return self._computed >= len(self._ids) - 1

    def advance(self, max_rows: int) -> Rescored:
        """Compute the next tokens. Returns the rows of the output tokens that they predict."""
        start, num_prompt = self._computed, len(self._text.prompt_ids)
        end = min(start + max_rows, len(self._ids) - 1)
        known = self._runner.model.config.vocab_size  # a draft may have fewer tokens: 0 replaces unknown ones
        tokens = [token if token < known else 0 for token in self._ids[start:end]]
        wanted = range(max(start, num_prompt - 1) + 1, end + 1)  # positions predicted, of output tokens only
        output = self._runner.forward([Span(self._blocks, start, tokens, num_logits=len(wanted))])
        self._computed = end
        rows = tuple(self._row(position) for position in wanted)
        chosen = self._ids[wanted.start : wanted.stop]
        logits = torch.empty(0, known) if output.logits is None else output.logits
        return Rescored(wanted.start - num_prompt, chosen, logits, rows)

    def _row(self, position: int) -> RowContext:
        text, mask = self._text, None
        if self._state is not None:
            mask = self._state.masks()[0]
            try:
                self._state.advance([self._ids[position]])
            except InvalidRequest:  # its row shows that it was impossible; later rows have no mask
                self._state = None
        ids = self._ids[:position]
        return RowContext(text.sampling, text.seed, text.choice, position, ids, len(text.prompt_ids), mask=mask)


def differences(rescored: Rescored, dtype: torch.dtype | None) -> list[Difference]:
    """Coupled and greedy text: the tokens that are not the picks. `dtype` is `computed_in(runner)`."""
    if not rescored.tokens:
        return []
    at_once = max(1, PICKING_BYTES // (SORT_BYTES * rescored.logits.shape[1]))
    picks: list[int] = []
    for start in range(0, len(rescored.tokens), at_once):
        part = slice(start, start + at_once)
        picks += pick(rescored.logits[part], rescored.rows[part]).tolist()
    found = []
    for i, (token, best) in enumerate(zip(rescored.tokens, picks, strict=True)):
        if token != best:
            logits, row = rescored.logits[i : i + 1], rescored.rows[i]
            raised = logits.to(torch.float32, copy=True)
            raised[0, token] += rounding(logits, dtype)
            is_rounding = int(pick(raised, [row])[0]) == token
            found.append(Difference(rescored.first + i, token, best, _gap(logits, row, best, token), is_rounding))
    return found


def rounding(logits: Tensor, dtype: torch.dtype | None) -> float:
    """Difference of two of these logits that another pass over the same tokens may produce."""
    if dtype is None:
        return 0.0
    if dtype in (torch.float32, torch.float64):
        return FLOAT32_GAP
    finite = logits[logits.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 1.0
    return STEPS * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1.0)))


def computed_in(runner: ModelRunner) -> torch.dtype | None:
    """None if all passes over the same tokens give the same bits: the native CPU kernels. Otherwise the coarser type of model
    and cache. An 8-bit cache counts as bfloat16: it rounds values that are already summed."""
    if runner.device.type == "cpu" and runner.model.dtype is torch.float32 and native.available():
        return None
    cache = runner.cache[0][0].dtype
    if cache.itemsize == 1 and runner.model.dtype in (torch.float32, torch.float64):
        return torch.bfloat16
    return runner.model.dtype


def _gap(logits: Tensor, row: RowContext, best: int, token: int) -> float:
    if row.params.is_greedy:
        scores = process(logits, [row])[0]
        return float(scores[best] - scores[token])
    scores = log_distribution(logits, [row])[0, [best, token]]
    noise = gumbel_at([row.key], Purpose.SHARED, torch.tensor([[best, token]], device=logits.device))[0]
    gap = scores + noise
    return float(gap[0] - gap[1]) * row.params.temperature
