"""Decides which sequences join a step, how many prompt tokens it computes, and how many rows a pass is padded to. The engine
and the simulator share these rules.

A step computes so few prompt tokens that sequences that decode do not wait long: `PromptPacer` measures how many.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

CHEAP_ROWS = 512
"""Rows up to which a pass hides most of the work of prompts behind reading the weights."""
MIXED_PROMPT_ROWS = 8192
"""Most prompt rows of a mixed step: decoding sequences wait for them, 160 ms with an 8B model on an H200."""
MIN_PROMPT_ROWS = 16
"""Fewest prompt rows of a mixed step, the tokens of a cache block."""
DRAFT_PREFILL_SLOWDOWN = 3.0
"""Time of a draft prefill that runs in the steps of sequences that decode, over its time alone. It slows the steps down, and
the sequence does not draft until it is complete. With a factor of 1, 128 sequences of 128 tokens lost 7% on an H200."""

LEAST_SHARE = 0.25
"""Least part of a step for prompts, also where decoding alone misses the objective."""
MIN_TOKENS = 32
"""Fewest prompt tokens of a step, at the beginning of a prompt."""
LEAST_MEASURED = 8
"""Fewest prompt tokens of a step that is measured on a CPU. On a GPU fewer than `CHEAP_ROWS` take hardly any time."""
WEIGHT = 0.25
"""Weight of the newest measurement."""
KEPT = 0.99
"""Weight that a step keeps with each later one, where the cost of context is measured."""
LEAST_SPREAD = 128.0
"""Standard deviation of contexts from which their cost is known."""
MAX_WEIGHT = 0.01
"""Largest cost of a token of context, in rows. On two cores it is 0.0015 for the embedded model."""


def admits(need: int, free: int, running: int, most: int) -> bool:
    """Whether a waiting sequence may join: fewer than `most` sequences run, and the KV cache has as much free as it needs.

    `need` differs. The engine counts the blocks of the committed tokens and a spare one for each sequence, and preempts later
    if more are needed. The simulator counts the tokens of the whole request and never preempts.
    """
    return running < most and need <= free


def prompt_budget(num_decoding: int, num_waiting: int) -> int:
    """Prompt rows of the next mixed step of the graph executor, in which `num_decoding` sequences decode. `num_waiting` prompt
    rows wait in all."""
    rows = CHEAP_ROWS - num_decoding
    if num_waiting > rows:
        rows = num_waiting if num_waiting < MIXED_PROMPT_ROWS else MIXED_PROMPT_ROWS
    return rows if rows > MIN_PROMPT_ROWS else MIN_PROMPT_ROWS


def padded_size(count: int) -> int:
    """Sequences, or rows of a sequence, that a padded pass over `count` has room for."""
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64


@dataclass(frozen=True, slots=True)
class Objectives:
    """What the size of prompt pieces follows, in seconds."""

    ttft: float = 1.0
    """Time to the first token of a prompt that the step has time for."""
    tpot: float = 0.2
    """Time of a step in which sequences decode."""


DEFAULT_OBJECTIVES = Objectives()


class PromptRoom(NamedTuple):
    """How many prompt rows a step has time for."""

    rows: float
    """Rows at the beginning of a prompt."""
    context_weight: float = 0.0
    """Share of such a row that each token before a row costs in addition."""

    def cost(self, rows: int, context: int) -> float:
        """What `rows` cost after `context` tokens of a prompt, in rows at the beginning of one."""
        return rows * (1.0 + self.context_weight * (context + rows / 2.0))

    def most(self, left: float, context: int) -> int:
        """Most rows after `context` tokens that cost no more than what is `left` of the room."""
        if left <= 0.0:
            return 0
        first, weight = 1.0 + self.context_weight * context, self.context_weight
        if weight <= 0.0:
            return int(left)
        return int((sqrt(first * first + 2.0 * weight * left) - first) / weight)


class PromptClaim(NamedTuple):
    """A prompt that waits for its first token."""

    rows: int
    context: int
    """Its tokens before these rows."""
    waited: float


def prompt_room(
    objectives: Objectives,
    decoding_seconds: float,
    row_seconds: float,
    context_weight: float,
    claims: Iterable[PromptClaim],
) -> PromptRoom:
    """Room for prompt rows in a step whose decoding takes `decoding_seconds`, if a row at the beginning of a prompt takes
    `row_seconds`. The claims are in the order in which they get rows.

    As much as `Objectives.tpot` allows, and at least a quarter of the time. More, up to half of the time, if a claim meets
    `Objectives.ttft` with it and not without: a claim meets it with r rows in each step if all rows up to its last, R, have

        R / r steps * (decoding_seconds + r * row_seconds) <= ttft - waited
    """
    rows = max(objectives.tpot - decoding_seconds, decoding_seconds * LEAST_SHARE / (1.0 - LEAST_SHARE)) / row_seconds
    most = decoding_seconds / row_seconds
    if rows < most:
        before, unit = 0.0, PromptRoom(0, context_weight)
        for claim in claims:
            before += unit.cost(claim.rows, claim.context)
            slack = objectives.ttft - claim.waited - before * row_seconds
            if slack > 0.0 and (needed := before * decoding_seconds / slack) <= most:
                rows = max(rows, needed)
    return PromptRoom(max(float(MIN_TOKENS), rows), context_weight)


class PromptPacer:
    """Measures what decoding costs in a step, what a prompt row adds to it, and how that grows with the context."""

    def __init__(self, objectives: Objectives, least_rows: int = LEAST_MEASURED) -> None:
        """Steps with `least_rows` prompt rows show what a row costs."""
        self._objectives, self._least_rows = objectives, least_rows
        self._row_seconds: float | None = None
        """Of a row at the beginning of a prompt."""
        self._decoding: dict[int, float] = {}
        """Time of steps without prompts and drafts, by `padded_size` of their sequences."""
        self._weight = _ContextWeight()

    def observe(
        self, num_decoding: int, num_drafted: int, prompt_rows: int, seconds: float, mean_context: float = 0.0
    ) -> None:
        """A step, drafting included, took this long. `num_drafted` is the number of draft tokens that it verified, and
        `mean_context` the mean number of tokens before a prompt row."""
        size = padded_size(num_decoding) if num_decoding else 0
        if prompt_rows < self._least_rows:
            if size and not prompt_rows and not num_drafted:
                self._decoding[size] = _average(self._decoding.get(size), seconds)
            return
        decoding = 0.0 if not size else self._decoding.get(size)
        if decoding is None or num_drafted or decoding >= seconds:  # all rows take the same time
            row_seconds = seconds / (prompt_rows + num_decoding + num_drafted)
        else:
            row_seconds = (seconds - decoding) / prompt_rows
        self._weight.observe(prompt_rows, mean_context, row_seconds)
        self._row_seconds = _average(self._row_seconds, row_seconds / (1.0 + self._weight.value * mean_context))

    def room(self, num_decoding: int, claims: Iterable[PromptClaim]) -> PromptRoom | None:
        """The room of a step in which `num_decoding` sequences decode. None if no step was measured yet."""
        row_seconds = self._row_seconds
        if not row_seconds:
            return None
        decoding = self._decoding.get(padded_size(num_decoding), num_decoding * row_seconds) if num_decoding else 0.0
        return prompt_room(self._objectives, decoding, row_seconds, self._weight.value, claims)


class _ContextWeight:
    """The slope of the time of a prompt row over its context, divided by its time at the beginning of a prompt: a weighted
    linear regression in which old steps count less. The quotient is a property of model and machine, and changes less than
    the times."""

    def __init__(self) -> None:
        self.value = 0.0
        self._sums = [0.0] * 5
        """Of rows, rows x, rows y, rows x x and rows x y, for the context x and the time y."""

    def observe(self, rows: int, context: float, seconds: float) -> None:
        moments = (1.0, context, seconds, context * context, context * seconds)
        self._sums = [KEPT * last + rows * moment for last, moment in zip(self._sums, moments, strict=True)]
        total, x, y, xx, xy = self._sums
        x, y = x / total, y / total
        variance, slope = xx / total - x * x, xy / total - x * y
        if variance < LEAST_SPREAD * LEAST_SPREAD:
            return
        slope /= variance
        start = y - slope * x
        self.value = min(max(slope / start, 0.0), MAX_WEIGHT) if start > 0.0 else MAX_WEIGHT


def _average(last: float | None, measured: float) -> float:
    return measured if last is None else (1.0 - WEIGHT) * last + WEIGHT * measured
