"""The decoding sequences of a worker: advanced many steps at once, or step by step with sampled acceptance."""

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Protocol

from paceline.planning.simulation.workers.depths import PolicyDepths
from paceline.planning.simulation.workers.job import Job
from paceline.planning.simulation.workers.rounds import Round, Rounds

_NEAREST = 0.499
"""Share of a step's work that may be missing at the end: after a change of depth, ends fall on the nearest step."""
_FEW_TOKENS = 40
"""Tokens up to which the rounds of a sequence are drawn one by one."""
_WEIGHT_STEP = 0.02
"""Logarithm of the ratio between the weights of two groups."""


class Batch(Protocol):
    @property
    def count(self) -> int: ...

    @property
    def context(self) -> float:
        """Tokens of all sequences."""
        ...

    def add(self, job: Job, last: Round) -> None:
        """The prompt of `job` is computed. `last`: the round that the batch would run now."""
        ...

    def decide(self, drafting: int, prompt_rows: int = 0) -> Round:
        """The next round, beside `prompt_rows`. `drafting`: sequences at the draft device; 0: there are no drafts."""
        ...

    def max_steps(self, step: Round) -> int:
        """Steps of this kind until a sequence may end."""
        ...

    def advance(self, steps: int, step: Round, prompt_rows: int = 0) -> Sequence[Job]:
        """The sequences that end with the last of `steps` steps, which computed `prompt_rows` of prompts."""
        ...

    def drain(self) -> list[tuple[Job, int]]:
        """Remove all sequences, with the tokens that each has generated since it joined, the first included."""
        ...


class _Group:
    """Sequences for which one plain step is worth `weight` expected tokens of drafting rounds."""

    __slots__ = ("ends", "progress", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.progress = 0.0
        self.ends: list[tuple[float, int, Job]] = []
        """(progress at the end, id, sequence), a heap."""


class ClosedBatch:
    """Advances by expected tokens. The number of rounds that a sequence needs is drawn when it joins.

    A sequence that lacks t tokens needs t plain steps, or n rounds of E expected tokens; the last round yields more than it
    needs, so n E > t on average. Its work is n E. A drafting round does E of it, at any depth, and a plain step n E / t = w.
    Sequences with about the same w are a group with a common progress, so that a heap holds their ends and no step is visited.
    """

    def __init__(self, rounds: Rounds, dice: random.Random) -> None:
        self._rounds, self._dice = rounds, dice
        self._groups: dict[int, _Group] = {}
        self.count = 0
        self._progress = 0.0
        """Sum of the expected tokens of all steps."""
        self._offset = 0.0
        """Sum over sequences of prompt + 1 - progress at the start: the context is this and `count` times the progress."""

    @property
    def context(self) -> float:
        return self._offset + self.count * self._progress

    def add(self, job: Job, last: Round) -> None:
        tokens = job.left - 1
        work = self._num_rounds(tokens, last) * last.tokens
        bucket = round(math.log(work / tokens) / _WEIGHT_STEP) if last.depth else 0
        group = self._groups.get(bucket)
        if group is None:
            group = self._groups[bucket] = _Group(math.exp(bucket * _WEIGHT_STEP))
        heappush(group.ends, (group.progress + work, job.id, job))
        job.began = self._progress
        self._offset += job.length + 1 - job.began
        self.count += 1

    def decide(self, drafting: int, prompt_rows: int = 0) -> Round:
        return self._rounds.best(self.count, self.context, drafting, prompt_rows)

    def max_steps(self, step: Round) -> int:
        left = [group.ends[0][0] - group.progress for group in self._groups.values()]
        if step.depth:
            return max(1, math.ceil(min(left) / step.tokens - _NEAREST))
        steps = [each / group.weight for each, group in zip(left, self._groups.values(), strict=True)]
        return max(1, math.ceil(min(steps) - _NEAREST))

    def advance(self, steps: int, step: Round, prompt_rows: int = 0) -> list[Job]:
        self._progress += steps * step.tokens
        depth, each = step.depth, step.tokens
        ended: list[Job] = []
        empty = []
        for bucket, group in self._groups.items():
            if not depth:
                each = group.weight
            group.progress += steps * each
            limit, ends = group.progress + _NEAREST * each, group.ends
            if ends[0][0] > limit:
                continue
            while ends and ends[0][0] <= limit:
                job = heappop(ends)[2]
                self._offset -= job.length + 1 - job.began
                ended.append(job)
            if not ends:
                empty.append(bucket)
        for bucket in empty:
            del self._groups[bucket]
        self.count -= len(ended)
        if not self.count:
            self._progress = self._offset = 0.0
        return ended

    def drain(self) -> list[tuple[Job, int]]:
        drained = [
            (job, max(1, min(job.left - 1, job.left - round((end - group.progress) / group.weight))))
            for group in self._groups.values()
            for end, _, job in group.ends
        ]
        self._groups.clear()
        self.count, self._progress, self._offset = 0, 0.0, 0.0
        return drained

    def _num_rounds(self, tokens: int, step: Round) -> int:
        """Rounds until the sum of their tokens X reaches `tokens`: about normal, with the mean (tokens + overshoot) / E X and
        the variance tokens Var X / (E X)^3. The overshoot of the last round is (E X^2 / E X - 1) / 2."""
        if not step.depth:
            return tokens
        if tokens <= _FEW_TOKENS:
            return self._draw_rounds(tokens, step)
        mean = step.tokens
        overshoot = ((step.variance + mean * mean) / mean - 1.0) / 2.0
        drawn = self._dice.gauss((tokens + overshoot) / mean, math.sqrt(tokens * step.variance / mean**3))
        least = math.ceil(tokens / (step.depth + 1))
        return min(max(math.floor(drawn + self._dice.random()), least), tokens)

    def _draw_rounds(self, tokens: int, step: Round) -> int:
        """The same, drawn round by round."""
        count = 0
        while tokens > 0:
            tokens -= 1 + num_accepted(step, step.depth, self._dice)
            count += 1
        return count


def num_accepted(step: Round, depth: int, dice: random.Random) -> int:
    """A drawn number of accepted drafts. P(accepted >= k) = S_k: it is the number of S_k above a uniform variate."""
    return bisect_left(step.rejection, -dice.random(), 0, depth)


class SteppedBatch:
    """Visits every sequence in every step."""

    def __init__(self, rounds: Rounds, dice: random.Random, policy: PolicyDepths | None = None) -> None:
        """`policy`: the production policy that decides depths; None: the depth with the most expected tokens."""
        self._rounds, self._dice, self._policy = rounds, dice, policy
        self._jobs: list[Job] = []
        self._tokens = 0
        self._depths: list[int] = []
        """Depths that the policy chose for the next step."""
        self._is_drafting = False
        """Whether sequences that are still here drafted in the last step."""

    @property
    def count(self) -> int:
        return len(self._jobs)

    @property
    def context(self) -> float:
        return float(self._tokens)

    def add(self, job: Job, last: Round) -> None:
        job.generated = 1
        job.has_draft = self._is_drafting
        self._tokens += job.length + 1
        self._jobs.append(job)

    def decide(self, drafting: int, prompt_rows: int = 0) -> Round:
        if self._policy is None or not drafting:
            return self._rounds.best(self.count, self.context, drafting, prompt_rows)
        self._depths = self._policy.decide(self._jobs)
        return self._policy.round_of(self._depths, self._rounds, drafting)

    def max_steps(self, step: Round) -> int:
        return 1

    def advance(self, steps: int, step: Round, prompt_rows: int = 0) -> list[Job]:
        context = self._tokens
        depths = self._depths if self._depths and step.depth else [step.depth] * len(self._jobs)
        accepted = [num_accepted(step, depth, self._dice) if depth else 0 for depth in depths]
        if self._policy is not None:
            self._policy.observe(self._jobs, self._depths, accepted, context, step, prompt_rows, self._rounds)
            self._depths = []
        ended: list[Job] = []
        kept: list[Job] = []
        for job, more in zip(self._jobs, accepted, strict=True):
            made = min(1 + more, job.left - job.generated)
            job.generated += made
            self._tokens += made
            (ended if job.generated >= job.left else kept).append(job)
        for job in ended:
            self._tokens -= job.length + job.generated
        self._jobs, self._is_drafting = kept, bool(step.depth and kept)
        return ended

    def drain(self) -> list[tuple[Job, int]]:
        drained = [(job, job.generated) for job in self._jobs]
        self._jobs, self._depths, self._tokens = [], [], 0
        return drained
