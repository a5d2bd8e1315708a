"""The decoding sequences of a worker: advanced many steps at once, or step by step with sampled acceptance."""

import random
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil, floor, sqrt
from typing import Protocol

from paceline.cluster.cost.cost import survival
from paceline.planning.simulation.depths import PolicyDepths
from paceline.planning.simulation.job import Job
from paceline.planning.simulation.rounds import Round, Rounds

_ROUNDING = 1e-9


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

    def decide(self) -> Round:
        """The next round of a batch that only decodes."""
        ...

    def max_steps(self, step: Round) -> int:
        """Steps of this kind until a sequence may end."""
        ...

    def advance(self, steps: int, step: Round) -> Sequence[Job]:
        """The sequences that end with the last of `steps` steps."""
        ...


class ClosedBatch:
    """Advances by expected tokens. The number of rounds that a sequence needs is drawn when it joins.

    Progress V is the sum of the expected tokens of all rounds so far. A sequence that joined at V_0 and needs n rounds of E
    tokens ends at V_0 + n E, also if later rounds have another depth. So a heap holds the ends, and steps are not visited.
    """

    def __init__(self, rounds: Rounds, dice: random.Random) -> None:
        self._rounds, self._dice = rounds, dice
        self._progress = 0.0
        self._offset = 0.0
        """Sum over sequences of prompt + 1 - V_0, so that the context is this and `count` times V."""
        self._ends: list[tuple[float, int, Job]] = []

    @property
    def count(self) -> int:
        return len(self._ends)

    @property
    def context(self) -> float:
        return self._offset + len(self._ends) * self._progress

    def add(self, job: Job, last: Round) -> None:
        job.began = self._progress
        self._offset += job.prompt_tokens + 1 - job.began
        end = job.began + self._num_rounds(job.output_tokens - 1, last) * last.tokens
        heappush(self._ends, (end, job.id, job))

    def decide(self) -> Round:
        return self._rounds.best(self.count, self.context)

    def max_steps(self, step: Round) -> int:
        return max(1, ceil((self._ends[0][0] - self._progress) / step.tokens - _ROUNDING))

    def advance(self, steps: int, step: Round) -> list[Job]:
        self._progress += steps * step.tokens
        ended, limit = [], self._progress + _ROUNDING * max(1.0, self._progress)
        while self._ends and self._ends[0][0] <= limit:
            job = heappop(self._ends)[2]
            self._offset -= job.prompt_tokens + 1 - job.began
            ended.append(job)
        if not self._ends:
            self._progress = self._offset = 0.0
        return ended

    def _num_rounds(self, tokens: int, step: Round) -> int:
        """Rounds until the sum of their tokens X reaches `tokens`: about normal, with the mean (tokens + overshoot) / E X and
        the variance tokens Var X / (E X)^3. The overshoot of the last round is (E X^2 / E X - 1) / 2."""
        if not step.depth:
            return tokens
        mean = step.tokens
        overshoot = ((step.variance + mean * mean) / mean - 1.0) / 2.0
        drawn = self._dice.gauss((tokens + overshoot) / mean, sqrt(tokens * step.variance / mean**3))
        least = ceil(tokens / (step.depth + 1))
        return min(max(floor(drawn + self._dice.random()), least), tokens)


class SteppedBatch:
    """Visits every sequence in every step."""

    def __init__(
        self, rounds: Rounds, dice: random.Random, alphas: Sequence[float], policy: PolicyDepths | None = None
    ) -> None:
        """`policy`: the production policy that decides depths; None: the depth with the most expected tokens."""
        self._rounds, self._dice, self._alphas, self._policy = rounds, dice, alphas, policy
        self._jobs: list[Job] = []
        self._tokens = 0
        self._depths: list[int] = []
        """Depths that the policy chose for the next step."""

    @property
    def count(self) -> int:
        return len(self._jobs)

    @property
    def context(self) -> float:
        return float(self._tokens)

    def add(self, job: Job, last: Round) -> None:
        job.generated = 1
        self._tokens += job.prompt_tokens + 1
        self._jobs.append(job)

    def decide(self) -> Round:
        if self._policy is None:
            return self._rounds.best(self.count, self.context)
        self._depths = self._policy.decide(self._jobs)
        return self._policy.round_of(self._depths, self._rounds)

    def max_steps(self, step: Round) -> int:
        return 1

    def advance(self, steps: int, step: Round) -> list[Job]:
        context = self._tokens
        depths = self._depths if self._depths and step.depth else [step.depth] * len(self._jobs)
        chances = [-one for one in survival(self._alphas, step.depth)]
        accepted = [self._accepted(depth, chances) for depth in depths]
        if self._policy is not None:
            self._policy.observe(self._jobs, self._depths, accepted, context, self._rounds)
            self._depths = []
        ended, kept = [], []
        for job, more in zip(self._jobs, accepted, strict=True):
            made = min(1 + more, job.output_tokens - job.generated)
            job.generated += made
            self._tokens += made
            (ended if job.generated >= job.output_tokens else kept).append(job)
        for job in ended:
            self._tokens -= job.prompt_tokens + job.generated
        self._jobs = kept
        return ended

    def _accepted(self, depth: int, chances: Sequence[float]) -> int:
        """P(accepted >= k) = S_k: the number of S_k above a uniform variate."""
        return bisect_left(chances, -self._dice.random(), 0, depth) if depth else 0
