"""The decoding sequences of a worker: advanced many steps at once, or step by step with sampled acceptance."""

import math
import random
from bisect import bisect_left
from heapq import heappop, heappush
from operator import mul
from typing import Protocol

from paceline.planning.simulator.depths import PolicyDepths
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.rounds import KindTokens, Rounds, SimulatedRound
from paceline.planning.simulator.texts import KINDS

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

    def growth(self, step: SimulatedRound) -> float:
        """Expected tokens that a step adds to the context."""
        ...

    def add(self, job: SimulatedRequest, last: SimulatedRound) -> None:
        """Add `job`, whose prompt is computed. `last` is the round that the batch would run now."""
        ...

    def decide(self, drafting: int, prompt_rows: int = 0) -> SimulatedRound:
        """The next round, in a step that also computes `prompt_rows`. `drafting` is the number of sequences at the draft
        device, 0 if there are no drafts."""
        ...

    def max_steps(self, step: SimulatedRound) -> int:
        """Steps of this kind until a sequence may end."""
        ...

    def advance(self, steps: int, step: SimulatedRound, prompt_rows: int = 0) -> list[SimulatedRequest]:
        """The sequences that end with the last of `steps` steps, which computed `prompt_rows` of prompts."""
        ...

    def drain(self) -> list[tuple[SimulatedRequest, int]]:
        """Remove all sequences, with the tokens that each has generated since it joined, the first included."""
        ...


class _Group:
    """Sequences for which one plain step is worth `weight` expected tokens of drafting rounds."""

    __slots__ = ("ends", "kind", "progress", "weight")

    def __init__(self, weight: float, kind: int) -> None:
        self.weight, self.kind = weight, kind
        self.progress = 0.0
        self.ends: list[tuple[float, int, SimulatedRequest]] = []
        """(progress at the end, id, sequence), a heap."""


class ClosedBatch:
    """Advances by expected tokens. The number of rounds that a sequence needs is drawn when it joins.

    A sequence that lacks t tokens needs t plain steps, or n rounds of E expected tokens; the last round yields more than it
    needs, so n E > t on average. Its work is n E. A drafting round does E of it, at any depth, and a plain step n E / t = w.
    Sequences of one kind of texts with about the same w are a group with a common progress, so that a heap holds their ends and
    no step is visited.
    """

    def __init__(self, rounds: Rounds, dice: random.Random) -> None:
        self._rounds, self._dice = rounds, dice
        self._groups: dict[int, _Group] = {}
        """By logarithm of the weight and kind."""
        self.count = 0
        self._is_uniform = rounds.num_kinds == 1
        """Whether all texts are of one kind."""
        self._counts = [0] * rounds.num_kinds
        """Sequences by kind."""
        self._progress = [0.0] * rounds.num_kinds
        """Sum of the expected tokens of all steps, by kind."""
        self._offset = 0.0
        """Sum over sequences of prompt + 1 - progress at the start: the context is this and the progress of every sequence."""

    @property
    def context(self) -> float:
        if self._is_uniform:
            return self._offset + self.count * self._progress[0]
        return self._offset + sum(map(mul, self._counts, self._progress))

    def growth(self, step: SimulatedRound) -> float:
        if self._is_uniform:
            return self.count * step.tokens
        return sum([count * kind.mean for count, kind in zip(self._counts, step.kinds, strict=True) if count])

    def add(self, job: SimulatedRequest, last: SimulatedRound) -> None:
        tokens, kind, work, bucket = job.left - 1, job.kind, float(job.left - 1), 0
        if last.depth:
            own = last.kinds[kind]
            work = self._num_rounds(tokens, last.depth, own) * own.mean
            bucket = round(math.log(work / tokens) / _WEIGHT_STEP)
        key = bucket * KINDS + kind
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(math.exp(bucket * _WEIGHT_STEP), kind)
        heappush(group.ends, (group.progress + work, job.id, job))
        began = job.began = self._progress[kind]
        self._offset += job.length + 1 - began
        self.count += 1
        self._counts[kind] += 1

    def decide(self, drafting: int, prompt_rows: int = 0) -> SimulatedRound:
        return self._rounds.best(self.count, self.context, drafting, prompt_rows)

    def max_steps(self, step: SimulatedRound) -> int:
        groups = self._groups.values()
        if not step.depth:
            least = min([(group.ends[0][0] - group.progress) / group.weight for group in groups])
        elif self._is_uniform:
            least = min([group.ends[0][0] - group.progress for group in groups]) / step.tokens
        else:
            least = min([(group.ends[0][0] - group.progress) / step.kinds[group.kind].mean for group in groups])
        steps = math.ceil(least - _NEAREST)
        return steps if steps > 1 else 1

    def advance(self, steps: int, step: SimulatedRound, prompt_rows: int = 0) -> list[SimulatedRequest]:
        depth, kinds, uniform = step.depth, step.kinds, self._is_uniform
        each = step.tokens
        if uniform:
            self._progress[0] += steps * each
        else:
            self._progress = [done + steps * kind.mean for done, kind in zip(self._progress, kinds, strict=True)]
        ended: list[SimulatedRequest] = []
        empty = []
        for key, group in self._groups.items():
            if not depth:
                each = group.weight
            elif not uniform:
                each = kinds[group.kind].mean
            done = group.progress = group.progress + steps * each
            limit, ends = done + _NEAREST * each, group.ends
            if ends[0][0] > limit:
                continue
            while ends and ends[0][0] <= limit:
                job = heappop(ends)[2]
                self._offset -= job.length + 1 - job.began
                self._counts[job.kind] -= 1
                ended.append(job)
            if not ends:
                empty.append(key)
        for key in empty:
            del self._groups[key]
        self.count -= len(ended)
        if not self.count:
            self._reset()
        return ended

    def drain(self) -> list[tuple[SimulatedRequest, int]]:
        drained = [
            (job, max(1, min(job.left - 1, job.left - round((end - group.progress) / group.weight))))
            for group in self._groups.values()
            for end, _, job in group.ends
        ]
        self._groups.clear()
        self._reset()
        return drained

    def _reset(self) -> None:
        """No sequence is left."""
        self.count, self._offset = 0, 0.0
        self._counts = [0] * len(self._counts)
        self._progress = [0.0] * len(self._progress)

    def _num_rounds(self, tokens: int, depth: int, kind: KindTokens) -> int:
        """Rounds until the sum of their tokens X reaches `tokens`: about normal, with the mean (tokens + overshoot) / E X and
        the variance tokens Var X / (E X)^3. The overshoot of the last round is (E X^2 / E X - 1) / 2."""
        if tokens <= _FEW_TOKENS:
            return self._draw_rounds(tokens, depth, kind)
        mean = kind.mean
        overshoot = ((kind.variance + mean * mean) / mean - 1.0) / 2.0
        drawn = self._dice.gauss((tokens + overshoot) / mean, math.sqrt(tokens * kind.variance / mean**3))
        least = math.ceil(tokens / (depth + 1))
        return min(max(math.floor(drawn + self._dice.random()), least), tokens)

    def _draw_rounds(self, tokens: int, depth: int, kind: KindTokens) -> int:
        """Draws the same number of rounds, round by round."""
        count = 0
        while tokens > 0:
            tokens -= 1 + num_accepted(kind, depth, self._dice)
            count += 1
        return count


def num_accepted(kind: KindTokens, depth: int, dice: random.Random) -> int:
    """A drawn number of accepted drafts. P(accepted >= k) = S_k: it is the number of S_k above a uniform variate."""
    return bisect_left(kind.rejection, -dice.random(), 0, depth)


class SteppedBatch:
    """Visits every sequence in every step."""

    def __init__(self, rounds: Rounds, dice: random.Random, policy: PolicyDepths | None = None) -> None:
        """`policy` is the production policy that decides depths. If None, the depth with the most expected tokens is taken."""
        self._rounds, self._dice, self._policy = rounds, dice, policy
        self._jobs: list[SimulatedRequest] = []
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

    def growth(self, step: SimulatedRound) -> float:
        return len(self._jobs) * step.tokens

    def add(self, job: SimulatedRequest, last: SimulatedRound) -> None:
        job.generated = 1
        job.has_draft = self._is_drafting
        self._tokens += job.length + 1
        self._jobs.append(job)

    def decide(self, drafting: int, prompt_rows: int = 0) -> SimulatedRound:
        if self._policy is None or not drafting:
            return self._rounds.best(self.count, self.context, drafting, prompt_rows)
        may_draft = self._rounds.may_draft_with_prompts(prompt_rows, self.count)
        self._depths = self._policy.decide(self._jobs, prompt_rows) if may_draft else self._policy.skip(self._jobs)
        return self._policy.round_of(self._depths, self._rounds, drafting, prompt_rows)

    def max_steps(self, step: SimulatedRound) -> int:
        return 1

    def advance(self, steps: int, step: SimulatedRound, prompt_rows: int = 0) -> list[SimulatedRequest]:
        context = self._tokens
        depths = self._depths if self._depths and step.depth else [step.depth] * len(self._jobs)
        kinds, dice = step.kinds, self._dice
        accepted = [
            num_accepted(kinds[job.kind], depth, dice) if depth else 0
            for job, depth in zip(self._jobs, depths, strict=True)
        ]
        if self._policy is not None:
            self._policy.observe(self._jobs, self._depths, accepted, context, step, prompt_rows, self._rounds)
            self._depths = []
        ended: list[SimulatedRequest] = []
        kept: list[SimulatedRequest] = []
        for job, more in zip(self._jobs, accepted, strict=True):
            made = min(1 + more, job.left - job.generated)
            job.generated += made
            self._tokens += made
            (ended if job.generated >= job.left else kept).append(job)
        for job in ended:
            self._tokens -= job.length + job.generated
        self._jobs, self._is_drafting = kept, bool(step.depth and kept)
        return ended

    def drain(self) -> list[tuple[SimulatedRequest, int]]:
        drained = [(job, job.generated) for job in self._jobs]
        self._jobs, self._depths, self._tokens = [], [], 0
        return drained
