"""What a planner remembers of past observations: lengths of requests, load by interval, and misses. Pure."""

import math
from collections import deque

from paceline.planning.autoscaling.capacity import RequestShape
from paceline.planning.autoscaling.observation import Observation
from paceline.planning.autoscaling.replay import TrafficSpan
from paceline.planning.profiles.profile import WorkerProfile

MIN_REQUESTS = 20
"""Requests from which mean lengths are known."""
KEEP = 0.9
"""Weight of the old sums of lengths when an observation is added."""
USUAL_ROWS, USUAL_BATCH, USUAL_CONTEXT = 512, 32, 2000
"""Passes by which the work of two requests is compared."""


class Lengths:
    """Decaying sums of lengths."""

    def __init__(self, profile: WorkerProfile) -> None:
        self._row = profile.rows_seconds(0, USUAL_ROWS) / USUAL_ROWS
        self._token = profile.verify_seconds(USUAL_BATCH, 0, USUAL_BATCH * USUAL_CONTEXT) / USUAL_BATCH
        self._started = self._prompt = self._cached = self._finished = self._output = 0.0

    def add(self, seen: Observation) -> None:
        self._started = KEEP * self._started + seen.started
        self._prompt = KEEP * self._prompt + seen.started_tokens
        self._cached = KEEP * self._cached + min(seen.cached_tokens, seen.started_tokens)
        self._finished = KEEP * self._finished + seen.finished
        self._output = KEEP * self._output + seen.output_tokens

    @property
    def shape(self) -> RequestShape | None:
        """The mean request. None if too few requests have ended."""
        if self._started < MIN_REQUESTS or self._finished < MIN_REQUESTS:
            return None
        prompt = (self._prompt - self._cached) / self._started
        return RequestShape(max(1, round(prompt)), max(1, round(self._output / self._finished)))

    def weight(self, seen: Observation) -> float:
        """Work of an arrival of the observation relative to the mean request, by its prompt."""
        shape = self.shape
        if shape is None or not seen.arrivals or not self._prompt:
            return 1.0
        prompt = seen.prompt_tokens / seen.arrivals * (1.0 - self._cached / self._prompt)
        answer = shape.output * self._token
        return (prompt * self._row + answer) / (shape.prompt * self._row + answer)


class LoadHistory:
    """The load of the last `intervals`, and the requests that missed the objective in them."""

    def __init__(self, intervals: int) -> None:
        self._spans: deque[TrafficSpan] = deque(maxlen=intervals)
        self._ends: deque[tuple[int, int]] = deque(maxlen=intervals)

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, seen: Observation, weight: float) -> None:
        ready = seen.pool("target").ready
        self._spans.append(TrafficSpan(seen.arrivals / seen.seconds, seen.seconds, ready, weight))
        self._ends.append((min(seen.missed, seen.finished), seen.finished))

    def clear(self) -> None:
        self._spans.clear()
        self._ends.clear()

    @property
    def spans(self) -> list[TrafficSpan]:
        return list(self._spans)

    @property
    def is_long(self) -> bool:
        """Whether it covers at least half of the intervals."""
        return 2 * len(self._spans) >= (self._spans.maxlen or 0)

    @property
    def missed(self) -> float:
        """Share of the finished requests that missed the objective."""
        finished = sum(count for _, count in self._ends)
        return sum(count for count, _ in self._ends) / finished if finished else 0.0


def problem(seen: Observation, last: float | None) -> str | None:
    """Why an observation cannot be used. None if it can. `last` is the time of the previous observation."""
    numbers = (seen.time, seen.seconds, seen.kv_use, seen.busy)
    if not all(map(math.isfinite, numbers)):
        return "a figure is not finite"
    if seen.seconds <= 0.0 or (last is not None and seen.time <= last):
        return "its time does not follow the last one"
    counts = (
        seen.arrivals,
        seen.prompt_tokens,
        seen.cached_tokens,
        seen.started,
        seen.started_tokens,
        seen.finished,
        seen.output_tokens,
        seen.missed,
        seen.waiting,
        seen.running,
    )
    if not all(math.isfinite(count) and count >= 0 for count in counts):
        return "a count is negative or not finite"
    return None
