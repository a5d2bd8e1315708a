"""A simulated worker with continuous batching, which computes chunks of prompts in the steps of the sequences that decode.

The steps of a worker between two events are one segment: `DecodeSegment` or `PromptSegment`.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from math import ceil, floor, sqrt
from typing import Protocol

from paceline.planning import WorkerProfile
from paceline.planning.simulator.batches import Batch
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.prefix_cache import PrefixCache
from paceline.planning.simulator.rounds import Rounds, SimulatedRound, prompt_bucket
from paceline.policy.step import admits, prompt_budget

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


class PromptSegment:
    """Steps with prompt rows, each with a time and a number of rows of its own."""

    __slots__ = ("_ends", "_rows", "end", "prompt_rows", "start", "step", "steps")

    def __init__(self, start: float, step: SimulatedRound, ends: Sequence[float], rows: Sequence[int]) -> None:
        """`ends` are the times at which the steps end. `rows` are the prompt rows up to the end of each step."""
        self.start, self.step = start, step
        self._ends, self._rows = ends, rows
        self.steps, self.end = len(ends), ends[-1]
        self.prompt_rows = rows[-1]
        """Prompt rows of all steps."""

    def shorten(self, now: float) -> bool:
        """End at the first boundary at or after `now`. Whether the end has changed."""
        return self._set_steps(min(bisect_left(self._ends, now - _EPSILON) + 1, self.steps))

    def cut(self, now: float) -> None:
        """Keep only the steps that have ended by `now`, which is before the end."""
        self._set_steps(min(bisect_right(self._ends, now), self.steps - 1))

    def _set_steps(self, steps: int) -> bool:
        if steps == self.steps:
            return False
        self.steps, self.end = steps, self._ends[steps - 1] if steps else self.start
        self.prompt_rows = self._rows[steps - 1] if steps else 0
        return True


SimulatedSteps = DecodeSegment | PromptSegment

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
        self._waiting: deque[SimulatedRequest] = deque()
        self._waiting_tokens = 0
        """Tokens of the requests that wait for admission."""
        self._prefilling: deque[SimulatedRequest] = deque()
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
        self._waiting.append(job)
        self._waiting_tokens += job.length
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
        moved = self.batch.drain() + [(job, 0) for job in (*self._prefilling, *self._waiting)]
        for job, generated in moved:
            self._drafts.close(job)
            job.move(generated)
        self._waiting.clear()
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
        return self._compute_prompts(rows) if rows else [], ended

    def _release(self, job: SimulatedRequest) -> None:
        need = self._need(job)
        self._reserved -= need
        self.cache.reserve(self.cache.tokens_of(job.prompt) - need)
        self._drafts.close(job)

    def _begin(self, now: float) -> None:
        if self._waiting:
            self._admit()
        segment: SimulatedSteps
        if self._pending:
            segment = self._mixed(now)
        elif self.batch.count:
            segment = self._decode(now)
        else:
            self._segment = self.end = None
            return
        self._segment, self.end = segment, segment.end

    def _decode(self, now: float) -> DecodeSegment:
        batch, each = self.batch, self._context_seconds
        step = batch.decide(self._drafts.load(batch.count))
        steps = batch.max_steps(step)
        if steps > MAX_STEPS:
            steps = MAX_STEPS
        return DecodeSegment(now, steps, step, step.seconds + each * batch.context, each * batch.growth(step))

    def _mixed(self, now: float) -> PromptSegment:
        """Steps with prompt rows, until a prompt is complete or a sequence may end."""
        batch, pending, head = self.batch, self._pending, self._prefilling[0]
        count, step, most, reading, growth = batch.count, _PLAIN, MAX_STEPS, 0.0, 0.0
        drafting = self._drafts.load(count)
        rows = min(pending, prompt_budget(count, pending))
        if count:
            step = batch.decide(drafting, rows)
            most = min(most, batch.max_steps(step))
            reading = self._context_seconds * batch.context
            growth = self._context_seconds * batch.growth(step)
        computed, left = head.computed, head.length - head.computed
        ends: list[float] = []
        cumulative: list[int] = []
        time, done, bucket = now, 0, 0
        pass_seconds, draft_seconds, attention = (
            self._rounds.pass_seconds,
            self._drafts.row_seconds(step.depth),
            self._attention,
        )
        waiting, own_rows, depth = step.waiting, step.rows, step.depth
        may_change = depth > 0 or not self._rounds.may_draft_with_prompts(rows, count)
        while True:
            time += waiting + pass_seconds(own_rows, rows) + draft_seconds * rows
            is_last = done + rows >= left
            if is_last:
                time += reading + attention * self._prompt_context(rows, done)
            else:
                time += reading + attention * rows * (computed + done + rows / 2.0)
            done += rows
            reading += growth
            ends.append(time)
            cumulative.append(done)
            if is_last or len(ends) >= most:
                return PromptSegment(now, step, ends, cumulative)
            rest = pending - done
            rows = prompt_budget(count, rest)
            if rows > rest:
                rows = rest
            if may_change and (next_bucket := prompt_bucket(rows)) != bucket:
                bucket = next_bucket
                if batch.decide(drafting, rows).depth != depth:
                    return PromptSegment(now, step, ends, cumulative)

    def _admit(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            need, running = self._need(job), self.batch.count + len(self._prefilling)
            if not admits(need, self._capacity - self._reserved, running, self._max_num_seqs):
                return
            self._waiting.popleft()
            self._waiting_tokens -= job.length
            self._reserved += need
            cached = min(self.cache.cached(job.prompt), job.length - 1)
            job.computed = min(job.received, job.length - 1) if job.received > cached else cached
            if not job.moves and not job.received:
                job.cached = cached
            self.cache.reserve(need - cached)
            job.found = cached
            self._pending += job.length - job.computed
            self._prefilling.append(job)

    def _compute_prompts(self, rows: int) -> list[SimulatedRequest]:
        """Compute the next `rows` prompt tokens, in order; the requests whose prompt is complete."""
        started = []
        rows = min(rows, self._pending)
        self._pending -= rows
        while rows:
            job = self._prefilling[0]
            part = min(rows, job.length - job.computed)
            job.computed += part
            rows -= part
            if job.computed == job.length:
                self._prefilling.popleft()
                self.cache.reserve(job.found - self.cache.tokens_of(job.prompt))
                self.cache.store(job.prompt)
                started.append(job)
        return started

    def _prompt_context(self, rows: int, done: int) -> float:
        """Sum over `rows` prompt rows, after `done` ones of the first prompt, of the tokens before each."""
        total = 0.0
        for job in self._prefilling:
            part = min(rows, job.length - job.computed - done)
            total += part * (job.computed + done + part / 2.0)
            rows, done = rows - part, 0
            if not rows:
                break
        return total

    def _need(self, job: SimulatedRequest) -> int:
        return job.length + job.left + self._max_depth
