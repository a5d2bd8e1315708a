"""A target worker with continuous batching: prompts in chunks beside the sequences that decode."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt

from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.batches import Batch
from paceline.planning.simulation.job import Job
from paceline.planning.simulation.prefix_cache import PrefixCache
from paceline.planning.simulation.rounds import Round, Rounds

MIN_ROWS, CHEAP_ROWS, MIXED_PROMPT_ROWS, BACKLOG_SHARE = 16, 512, 2048, 4
"""The rule of the graph executor for the prompt rows of a mixed step (`engine/executors/graph/mixed.py`)."""
MAX_STEPS = 256
"""Decoding steps after which the depth is decided again."""


def prompt_budget(num_decoding: int, num_waiting: int) -> int:
    """Prompt rows of the next mixed step, as the graph executor schedules them."""
    backlog = min(MIXED_PROMPT_ROWS, num_waiting // BACKLOG_SHARE)
    return max(MIN_ROWS, CHEAP_ROWS - num_decoding, backlog)


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps of one shape between two events. Contexts grow, so every step takes `slope` longer than the one before:

    D(n) = n first + slope n (n - 1) / 2
    """

    start: float
    steps: int
    step: Round
    prompt_rows: int
    """Prompt rows of each step."""
    first: float
    """Time of the first step."""
    slope: float

    def duration(self, steps: int) -> float:
        return steps * self.first + self.slope * steps * (steps - 1) / 2.0

    def steps_until(self, time: float) -> int:
        """Steps up to the first boundary at or after `time`, at least one."""
        elapsed, square = time - self.start, self.slope / 2.0
        linear = self.first - square
        steps = elapsed / linear
        if square > 0.0:
            steps = (sqrt(linear * linear + 4.0 * square * max(0.0, elapsed)) - linear) / (2.0 * square)
        return min(max(1, ceil(steps - 1e-9)), self.steps)


class SimulatedWorker:
    """Changes state at the boundaries of segments only. `end` is the time of the next one; None: the worker is idle."""

    def __init__(
        self,
        profile: WorkerProfile,
        rounds: Rounds,
        batch: Batch,
        cache: PrefixCache,
        max_depth: int,
        drafts_here: bool,
    ) -> None:
        """`max_depth`: slots that drafts of a sequence take in the KV cache. `drafts_here`: its device computes the prompts
        for the draft model too."""
        self.batch, self.cache = batch, cache
        self._profile, self._rounds, self._max_depth = profile, rounds, max_depth
        self._draft_prefill = profile.draft_prefill_seconds.value if drafts_here else 0.0
        self._capacity, self._max_num_seqs = int(profile.kv_tokens.value), int(profile.max_num_seqs.value)
        self._plain = Round(0, 1.0, 0.0, 0.0)
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._pending = 0
        """Prompt tokens to compute of the admitted requests."""
        self._reserved = 0
        """Tokens of the KV cache that admitted requests may need."""
        self._segment: Segment | None = None
        self.busy_seconds = 0.0
        self.steps = 0

    @property
    def end(self) -> float | None:
        return self._segment.start + self._segment.duration(self._segment.steps) if self._segment else None

    @property
    def kv_use(self) -> float:
        return min(1.0, self._reserved / self._capacity)

    def fits(self, job: Job) -> bool:
        return self._need(job) <= self._capacity

    def submit(self, job: Job, now: float) -> None:
        """The request joins at the next boundary; a segment of several steps ends there."""
        self._waiting.append(job)
        if self._segment is None:
            self._begin(now)
        elif self._segment.steps > 1:
            self._shorten(self._segment, now)

    def finish_segment(self) -> tuple[Sequence[Job], Sequence[Job]]:
        """Run the steps of the segment: the requests that got their first token, and those that ended. Begins the next."""
        segment = self._segment
        if segment is None:
            return (), ()
        seconds = segment.duration(segment.steps)
        now = segment.start + seconds
        self.busy_seconds += seconds
        self.steps += segment.steps
        ended = list(self.batch.advance(segment.steps, segment.step)) if self.batch.count else []
        started = self._compute_prompts(segment.steps * segment.prompt_rows) if segment.prompt_rows else []
        for job in started:
            job.first_token = now
            if job.output_tokens == 1:
                ended.append(job)
            else:
                self.batch.add(job, self._rounds.best(self.batch.count + 1, self.batch.context + job.prompt_tokens))
        for job in ended:
            job.finished = now
            need = self._need(job)
            self._reserved -= need
            self.cache.reserve(-(need - self.cache.tokens_of(job.prompt)))
        self._begin(now)
        return started, ended

    def _begin(self, now: float) -> None:
        self._admit()
        if self._pending:
            self._segment = self._mixed(now)
        elif self.batch.count:
            step = self.batch.decide()
            self._segment = self._make(now, min(MAX_STEPS, self.batch.max_steps(step)), step, 0, step.seconds)
        else:
            self._segment = None

    def _mixed(self, now: float) -> Segment:
        """Steps with prompt rows, without drafts. The rows of a step stay the same while the backlog is small."""
        batch = self.batch.count
        budget = prompt_budget(batch, self._pending)
        rows, steps = min(self._pending, budget), 1
        if budget == prompt_budget(batch, 0):
            head = self._prefilling[0]
            steps = max(1, min((head.prompt_tokens - head.computed) // rows, self._max_steps()))
        attention = self._profile.prompt_context_seconds.value
        seconds = self._rounds.pass_seconds(batch + rows) + self._draft_prefill * rows
        slope = attention * rows * rows if steps > 1 else 0.0
        return self._make(now, steps, self._plain, rows, seconds + attention * self._prompt_context(rows), slope)

    def _max_steps(self) -> int:
        return self.batch.max_steps(self._plain) if self.batch.count else MAX_STEPS

    def _make(self, now: float, steps: int, step: Round, rows: int, seconds: float, slope: float = 0.0) -> Segment:
        """`seconds` and `slope` without the context of the sequences that decode."""
        each = self._profile.context_seconds.value
        growth = each * self.batch.count * step.tokens
        return Segment(now, steps, step, rows, seconds + each * self.batch.context, slope + growth)

    def _shorten(self, segment: Segment, now: float) -> None:
        steps = segment.steps_until(now)
        if steps < segment.steps:
            self._segment = replace(segment, steps=steps)

    def _admit(self) -> None:
        while self._waiting and self.batch.count + len(self._prefilling) < self._max_num_seqs:
            job = self._waiting[0]
            need = self._need(job)
            if self._reserved + need > self._capacity:
                return
            self._waiting.popleft()
            self._reserved += need
            job.cached = job.computed = min(self.cache.cached(job.prompt), job.prompt_tokens - 1)
            self.cache.reserve(need - job.cached)
            self._pending += job.prompt_tokens - job.computed
            self._prefilling.append(job)

    def _compute_prompts(self, rows: int) -> list[Job]:
        """Compute the next `rows` prompt tokens, in order; the requests whose prompt is complete."""
        started = []
        rows = min(rows, self._pending)
        self._pending -= rows
        while rows:
            job = self._prefilling[0]
            part = min(rows, job.prompt_tokens - job.computed)
            job.computed += part
            rows -= part
            if job.computed == job.prompt_tokens:
                self._prefilling.popleft()
                self.cache.reserve(job.cached - self.cache.tokens_of(job.prompt))
                self.cache.store(job.prompt)
                started.append(job)
        return started

    def _prompt_context(self, rows: int) -> float:
        """Sum over the next `rows` prompt rows of the tokens before each."""
        total = 0.0
        for job in self._prefilling:
            part = min(rows, job.prompt_tokens - job.computed)
            total += part * (job.computed + part / 2.0)
            rows -= part
            if not rows:
                break
        return total

    def _need(self, job: Job) -> int:
        return job.prompt_tokens + job.output_tokens + self._max_depth
