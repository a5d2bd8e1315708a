"""A simulated worker with continuous batching, which computes chunks of prompts in the steps of the sequences that decode.

Steps without prompts between two events are one segment. A step with prompts is one of its own. Prompts share it by the rules
of the engine (`policy/prompt_line.py`, `policy/step.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil, floor, sqrt
from typing import Protocol

from paceline.core.sequence import BLOCK_SIZE
from paceline.planning import WorkerProfile
from paceline.planning.simulator.batches import Batch
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.prefix_cache import PrefixCache
from paceline.planning.simulator.rounds import Rounds, SimulatedRound
from paceline.policy.prompt_line import PromptLine
from paceline.policy.step import DEFAULT_OBJECTIVES, PromptClaim, PromptRoom, admits, prompt_budget, prompt_room

_EPSILON = 1e-9


class DecodeSegment:
    """Steps of one shape without prompts. Contexts grow, so every step takes `slope` longer than the one before:

    D(n) = n first + slope n (n - 1) / 2
    """

    __slots__ = ("_first", "_slope", "end", "start", "step", "steps")
    prompt_rows = 0

    def __init__(self, start: float, steps: int, step: SimulatedRound, first: float, slope: float) -> None:
        self.start, self.steps, self.step = start, steps, step
        self._first, self._slope = first, slope
        self.end = start + (steps * first + slope * steps * (steps - 1) / 2.0)

    def shorten(self, now: float) -> bool:
        """End at the first boundary at or after `now`, after at least one step. Whether the end has changed."""
        return self._set_steps(min(max(1, ceil(self._steps_at(now) - _EPSILON)), self.steps))

    def cut(self, now: float) -> None:
        """Keep only the steps that have ended by `now`, which is before the end."""
        self._set_steps(min(floor(self._steps_at(now)), self.steps - 1))

    def _set_steps(self, steps: int) -> bool:
        if steps == self.steps:
            return False
        self.steps = steps
        self.end = self.start + (steps * self._first + self._slope * steps * (steps - 1) / 2.0)
        return True

    def _steps_at(self, time: float) -> float:
        elapsed, square = max(0.0, time - self.start), self._slope / 2.0
        linear = self._first - square
        if square <= 0.0:
            return elapsed / linear
        return (sqrt(linear * linear + 4.0 * square * elapsed) - linear) / (2.0 * square)


@dataclass(slots=True)
class PromptSegment:
    """One step with prompt rows. It is not cut: a worker that is lost in it has not run it."""

    step: SimulatedRound
    start: float
    end: float
    prompts: Sequence[tuple[SimulatedRequest, int]]
    """Prompts, and their rows in the step."""
    steps: int = 1

    @property
    def prompt_rows(self) -> int:
        return sum([rows for _, rows in self.prompts])

    def shorten(self, now: float) -> bool:
        return False

    def cut(self, now: float) -> None:
        self.steps = 0


SimulatedSteps = DecodeSegment | PromptSegment

MOST_CLAIMS = 16
"""Prompts in the line for which the rows of a step are decided."""
MAX_STEPS = 256
"""Decoding steps after which the depth is decided again."""
_PLAIN = SimulatedRound(0, 1.0, 0.0, ())


class Drafting(Protocol):
    """The draft device of a worker."""

    def open(self, job: SimulatedRequest, now: float) -> None:
        """The sequence starts to decode."""
        ...

    def close(self, job: SimulatedRequest) -> None: ...

    def load(self, batch: int) -> int:
        """Number of sequences at the draft device that serves a batch of `batch` sequences. 0 if it cannot draft."""
        ...

    def row_seconds(self, depth: int) -> float:
        """Time that a prompt row of the draft model adds to a step of the target in which sequences draft `depth` tokens."""
        ...

    def ran(self, steps: int, depth: int) -> None:
        """The worker has run `steps` rounds of this depth."""
        ...


class NoDrafts:
    """Plain decoding."""

    def open(self, job: SimulatedRequest, now: float) -> None:
        pass

    def close(self, job: SimulatedRequest) -> None:
        pass

    def load(self, batch: int) -> int:
        return 0

    def row_seconds(self, depth: int) -> float:
        return 0.0

    def ran(self, steps: int, depth: int) -> None:
        pass


class DeviceDrafts(NoDrafts):
    """Drafts on the device of the target: it also computes the prompts of the draft model."""

    def __init__(self, profile: WorkerProfile, is_policy: bool) -> None:
        """With `is_policy` the draft model computes the prompts of sequences that join a batch which drafts, and other prompts
        when their sequences first draft (`PolicyDepths`). Without it, the draft model computes all prompts."""
        self._row_seconds, self._is_policy = profile.draft_prefill_seconds.value, is_policy

    def load(self, batch: int) -> int:
        return batch

    def row_seconds(self, depth: int) -> float:
        return self._row_seconds if depth or not self._is_policy else 0.0


class SimulatedWorker:
    """Changes state at the boundaries of segments only. `end` is the time of the next boundary, None if the worker is idle."""

    def __init__(
        self,
        profile: WorkerProfile,
        rounds: Rounds,
        batch: Batch,
        cache: PrefixCache,
        max_depth: int,
        drafts: Drafting,
    ) -> None:
        """`max_depth` is the number of slots that drafts of a sequence take in the KV cache."""
        self.batch, self.cache = batch, cache
        self._rounds, self._max_depth, self._drafts = rounds, max_depth, drafts
        self._context_seconds, self._attention = profile.context_seconds.value, profile.prompt_context_seconds.value
        self._capacity, self._max_num_seqs = int(profile.kv_tokens.value), int(profile.max_num_seqs.value)
        self._line = PromptLine[SimulatedRequest]()
        """Requests that wait for admission."""
        self._waiting_tokens = 0
        """Tokens of the requests that wait for admission."""
        self._prefilling: list[SimulatedRequest] = []
        self._pending = 0
        """Prompt tokens to compute of the admitted requests."""
        self._reserved = 0
        """Tokens of the KV cache that admitted requests may need."""
        self._segment: SimulatedSteps | None = None
        self.end: float | None = None
        self.busy_seconds = 0.0
        self.steps = 0

    @property
    def kv_use(self) -> float:
        return min(1.0, self._reserved / self._capacity)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait for their computation."""
        return self._pending + self._waiting_tokens

    def fits(self, job: SimulatedRequest) -> bool:
        return self._need(job) <= self._capacity

    def submit(self, job: SimulatedRequest, now: float) -> None:
        """The request joins at the next boundary; a segment of several steps ends there."""
        self._wait(job)
        segment = self._segment
        if segment is None:
            self._begin(now)
        elif segment.steps > 1 and segment.shorten(now):
            self.end = segment.end

    def reconsider(self, now: float) -> None:
        """Conditions have changed: the next boundary decides again."""
        segment = self._segment
        if segment is not None and segment.steps > 1 and segment.shorten(now):
            self.end = segment.end

    def finish_segment(self) -> tuple[Sequence[SimulatedRequest], Sequence[SimulatedRequest]]:
        """Run the steps of the segment: the requests that got their first token, and those that ended. Begins the next."""
        segment = self._segment
        if segment is None:
            return (), ()
        now = segment.end
        started, ended = self._run(segment)
        for job in started:
            if job.first_token < 0.0:
                job.first_token = now
            if job.left == 1:
                ended.append(job)
            else:
                self._drafts.open(job, now)
                count = self.batch.count + 1
                expected = self._rounds.best(count, self.batch.context + job.length, self._drafts.load(count))
                self.batch.add(job, expected)
        for job in ended:
            job.finished = now
            self._release(job)
        self._begin(now)
        return started, ended

    def stop(self, now: float) -> list[SimulatedRequest]:
        """The worker is lost: all its requests, ready to continue elsewhere from their committed tokens."""
        if self._segment is not None:
            self._segment.cut(now)
            if self._segment.steps:
                self._run(self._segment)
        moved = self.batch.drain() + [(job, 0) for job in (*self._prefilling, *self._line)]
        for job, generated in moved:
            self._drafts.close(job)
            job.move(generated)
        self._line = PromptLine()
        self._prefilling.clear()
        self._pending = self._reserved = self._waiting_tokens = 0
        self._segment = self.end = None
        self.cache.clear()
        return [job for job, _ in moved]

    def _run(self, segment: SimulatedSteps) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        steps, step, rows = segment.steps, segment.step, segment.prompt_rows
        self.busy_seconds += segment.end - segment.start
        self.steps += steps
        ended: list[SimulatedRequest] = []
        if self.batch.count:
            ended = self.batch.advance(steps, step, rows)
            if step.depth:
                self._drafts.ran(steps, step.depth)
        prompts = segment.prompts if isinstance(segment, PromptSegment) and steps else ()
        return self._compute_prompts(prompts), ended

    def _release(self, job: SimulatedRequest) -> None:
        need = self._need(job)
        self._reserved -= need
        self.cache.reserve(self.cache.tokens_of(job.prompt) - need)
        self._drafts.close(job)

    def _begin(self, now: float) -> None:
        segment: SimulatedSteps | None = None
        if self._prefilling or len(self._line):
            segment = self._mixed(now)
        if segment is None and self.batch.count:
            segment = self._decode(now)
        self._segment, self.end = segment, None if segment is None else segment.end

    def _decode(self, now: float) -> DecodeSegment:
        batch, each = self.batch, self._context_seconds
        step = batch.decide(self._drafts.load(batch.count))
        steps = batch.max_steps(step)
        if steps > MAX_STEPS:
            steps = MAX_STEPS
        return DecodeSegment(now, steps, step, step.seconds + each * batch.context, each * batch.growth(step))

    def _mixed(self, now: float) -> PromptSegment | None:
        """One step with prompt rows. None if no prompt has room."""
        batch, step, reading = self.batch, _PLAIN, 0.0
        count, drafting = batch.count, self._drafts.load(batch.count)
        prompts = self._share(now)
        rows = sum([part for _, part in prompts])
        if not rows:
            return None
        if count:
            step = batch.decide(drafting, rows)
            reading = self._context_seconds * batch.context
        context = sum([part * (job.computed + part / 2.0) for job, part in prompts])
        seconds = (
            step.waiting + self._rounds.pass_seconds(step.rows, rows) + self._drafts.row_seconds(step.depth) * rows
        )
        return PromptSegment(step, now, now + (seconds + reading + self._attention * context), prompts)

    def _room(self, now: float, budget: int) -> PromptRoom:
        """The time for prompt rows in the next step. `budget` is the most rows that the executor computes."""
        count = self.batch.count
        decoding = self._rounds.pass_seconds(count)
        row_seconds = (self._rounds.pass_seconds(count, budget) - decoding) / budget
        if not count or row_seconds <= 0.0:
            return PromptRoom(budget)
        decoding += self._context_seconds * self.batch.context
        return prompt_room(DEFAULT_OBJECTIVES, decoding, row_seconds, self._attention / row_seconds, self._claims(now))

    def _claims(self, now: float) -> Iterator[PromptClaim]:
        begun = sorted(self._prefilling, key=lambda job: job.num_uncomputed)
        for job in chain(begun, islice(self._line, MOST_CLAIMS)):
            yield PromptClaim(job.num_uncomputed, job.computed, now - job.arrival)

    def _share(self, now: float) -> list[tuple[SimulatedRequest, int]]:
        """The rows of each prompt in the next step. Admits the requests that begin."""
        budget = prompt_budget(self.batch.count, self._pending + self._waiting_tokens)
        room = self._room(now, budget)
        left = room.rows
        taken: dict[SimulatedRequest, int] = {}
        running = self.batch.count + len(self._prefilling)
        turns = self._line.turns(self._prefilling, min(budget, int(left)), may_begin=running < self._max_num_seqs)
        while (turn := turns.next(min(budget, int(left)))) is not None:
            job, before = turn.prompt, taken.get(turn.prompt, 0)
            rows = 0
            if self._line.has_begun(job) or self._admit(job):
                most = room.most(left, job.computed + before)
                if not taken:  # the first prompt gets some, whatever they cost
                    most = max(most, BLOCK_SIZE)
                rows = min(turn.most, most, job.num_uncomputed - before)
                left -= room.cost(rows, job.computed + before)
                taken[job] = before + rows
            elif not turns.refuse(turn) or self.batch.count + len(self._prefilling) >= self._max_num_seqs:
                turns.close()
            turns.took(job, rows, is_over=before + rows == job.num_uncomputed or rows < turn.most)
            budget -= rows
        return list(taken.items())

    def _wait(self, job: SimulatedRequest) -> None:
        known = max(self.cache.cached(job.prompt), job.received)
        self._line.add(job, max(1, job.length - known))
        self._waiting_tokens += job.length

    def _admit(self, job: SimulatedRequest) -> bool:
        """Whether the request has room, and begins."""
        need, running = self._need(job), self.batch.count + len(self._prefilling)
        if not admits(need, self._capacity - self._reserved, running, self._max_num_seqs):
            return False
        self._line.begin(job)
        self._waiting_tokens -= job.length
        self._reserved += need
        cached = min(self.cache.cached(job.prompt), job.length - 1)
        job.computed = min(job.received, job.length - 1) if job.received > cached else cached
        if not job.moves and not job.received:
            job.cached = cached
        self.cache.reserve(need - cached)
        job.found = cached
        self._pending += job.num_uncomputed
        self._prefilling.append(job)
        return True

    def _compute_prompts(self, prompts: Sequence[tuple[SimulatedRequest, int]]) -> list[SimulatedRequest]:
        """Compute these rows; the requests whose prompt is complete."""
        started = []
        for job, rows in prompts:
            self._pending -= rows
            job.computed += rows
            if not job.num_uncomputed:
                self._prefilling.remove(job)
                self._line.discard(job)
                self.cache.reserve(job.found - self.cache.tokens_of(job.prompt))
                self.cache.store(job.prompt)
                started.append(job)
        return started

    def _need(self, job: SimulatedRequest) -> int:
        return job.length + job.left + self._max_depth
