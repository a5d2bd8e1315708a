"""Prometheus metrics of requests. docs/metrics.md lists all names, which are stable.

Every label is bounded: one model, fixed outcomes and reasons, 32 positions, 32 categories. Further categories count as
`other`.

`RecentRate` and `RecentValues` are rates and percentiles over a recent time window. They are thread-safe. The caller passes the
time.
"""

import collections
import itertools
import math
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import MissingDependency
from paceline.core.output import StepOutput
from paceline.core.request import Categories, Request
from paceline.core.sequence import SpeculationCounts
from paceline.core.status import ClusterStatus, EngineStatus
from paceline.core.version import VERSION
from paceline.gateway.metrics.engine import EngineCollector, SpeculationTotals, VllmCollector
from paceline.gateway.metrics.workers import ClusterCollector
from paceline.policy.cost.curve import ROUNDS_KEEP, DecayingMean
from paceline.policy.overload import OverloadStage

RATE_WINDOW = 10.0
"""Seconds."""
VALUES_WINDOW = 60.0
"""Seconds."""
MAX_VALUES = 4096
"""Values kept; under heavy traffic they cover less than the window."""


class RecentRate:
    """Mean rate per second over a window, from sums of whole seconds."""

    def __init__(self, window: float = RATE_WINDOW) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._sums: deque[tuple[float, int]] = deque()

    def add(self, amount: int, now: float) -> None:
        second = float(int(now))
        with self._lock:
            if self._sums and self._sums[-1][0] == second:
                amount += self._sums.pop()[1]
            self._sums.append((second, amount))
            self._drop_old(now)

    def per_second(self, now: float) -> float:
        with self._lock:
            self._drop_old(now)
            return sum(amount for _, amount in self._sums) / self._window

    def _drop_old(self, now: float) -> None:
        while self._sums and self._sums[0][0] <= now - self._window:
            self._sums.popleft()


class RecentValues:
    """Percentiles of timed values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float, now: float) -> None:
        with self._lock:
            self._values.append((now, value))

    def percentiles(self, shares: Sequence[float], now: float) -> tuple[float, ...] | None:
        """Nearest-rank percentiles, one for each share between 0 and 1; None without values."""
        with self._lock:
            while self._values and self._values[0][0] <= now - VALUES_WINDOW:
                self._values.popleft()
            values = sorted(value for _, value in self._values)
        if not values:
            return None
        return tuple(values[max(0, math.ceil(share * len(values)) - 1)] for share in shares)


try:
    import prometheus_client
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingDependency("prometheus-client", "the server", "server") from None

LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
DURATION = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
COST_WINDOW = 60.0
"""Seconds over which the cost of a token is computed."""


@dataclass(slots=True)
class _ChoiceTimes:
    first_token: float
    later_tokens: int = 0


@dataclass(slots=True)
class _RunningRequest:
    """A request that is not finished."""

    started: float
    choices: dict[int, _ChoiceTimes] = field(default_factory=dict)


class _Category:
    """The time series of one category. Looking up labels costs more than counting, so it happens once."""

    def __init__(self, metrics: "Metrics", category: str) -> None:
        labels = (metrics.model, category)
        self.requests = {
            outcome: metrics.requests.labels(*labels, outcome) for outcome in ("stop", "length", "cancelled", "error")
        }
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.cached_tokens = metrics.cached_tokens.labels(*labels)
        self.generated = metrics.generated.labels(*labels)
        self.drafted = metrics.drafted.labels(*labels)
        self.accepted = metrics.accepted.labels(*labels)
        self._positions: list[Counter] = []
        self._by_position, self._labels = metrics.by_position, labels
        self.rounds = metrics.rounds.labels(*labels)
        self.depth = metrics.draft_depth.labels(*labels)
        self.rate = metrics.acceptance_rate.labels(*labels)
        self.first_token = metrics.first_token.labels(*labels)
        self.queue = metrics.queue.labels(*labels)
        self.per_token = metrics.per_token.labels(*labels)
        self.duration = metrics.duration.labels(*labels)
        self.recent = RecentRate()
        metrics.speed.labels(*labels).set_function(lambda: self.recent.per_second(metrics.clock()))
        self._recent_acceptance = DecayingMean(keep=ROUNDS_KEEP)

    def record_rounds(self, rounds: Sequence[StepOutput]) -> None:
        """Each series has a lock, so that this is called once for many outputs."""
        self.rounds.inc(len(rounds))
        self.drafted.inc(sum(output.drafted for output in rounds))
        self.accepted.inc(sum(output.accepted for output in rounds))
        for output in rounds:
            self.depth.observe(output.drafted)
            self._recent_acceptance.add(output.accepted, output.drafted)
        lengths = collections.Counter(output.accepted for output in rounds)
        longest = max(lengths)
        while len(self._positions) < longest:
            self._positions.append(self._by_position.labels(*self._labels, str(len(self._positions) + 1)))
        for position in range(1, longest + 1):
            self._positions[position - 1].inc(sum(count for length, count in lengths.items() if length >= position))
        self.rate.set(self._recent_acceptance.value(0.0))


class Metrics:
    """Counts requests: `record_submit`, then `record_outputs` of its steps, then `record_finish`.

    Times are seconds of `clock`, the clock of event loops. Calls for one request must not overlap; calls for different
    requests, and `render`, may come from any thread.
    """

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.model = model_name
        self.clock = clock
        self.registry = CollectorRegistry()
        labels = ["model", "category"]
        self.requests = self._counter(
            "requests", "Finished requests by outcome: stop, length, cancelled, error.", "outcome"
        )
        self.rejections = Counter(
            "paceline_rejected",
            "Requests rejected before they reached the engine, by reason.",
            ["model", "reason"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of submitted requests.")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generated = self._counter("generated_tokens", "Tokens committed.")
        self.drafted = self._counter("drafted_tokens", "Tokens drafted.")
        self.accepted = self._counter("accepted_tokens", "Drafted tokens accepted.")
        self.by_position = self._counter(
            "accepted_tokens_by_position", "Drafted tokens accepted, by position in the draft, from 1.", "position"
        )
        self.rounds = self._counter("rounds", "Rounds: one propose-and-verify of one sequence.")
        self.draft_depth = self._histogram("draft_depth", "Tokens drafted per round.", DEPTHS)
        self.acceptance_rate = Gauge(
            "paceline_draft_acceptance_rate",
            "Accepted / drafted tokens over about the last 128 rounds.",
            labels,
            registry=self.registry,
        )
        self.speed = Gauge(
            "paceline_effective_tokens_per_second",
            "Tokens committed per second over the last 10 seconds.",
            labels,
            registry=self.registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", LATENCY
        )
        self.queue = self._histogram("queue_seconds", "Time that a choice waits for a place in the batch.", LATENCY)
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Time from first to last token of a choice, per token.", PER_TOKEN
        )
        self.recent_first_token, self.recent_per_token = RecentValues(), RecentValues()
        self._recent_tokens, self._started = RecentRate(COST_WINDOW), clock()
        self.duration = self._histogram("request_duration_seconds", "Time from arrival to the end.", DURATION)
        self.loop_lag = Histogram(
            "paceline_event_loop_lag_seconds",
            "Delay of a callback of the event loop, measured 20 times a second.",
            ["model"],
            buckets=LAG,
            registry=self.registry,
        ).labels(model_name)
        self.cpu = Counter(
            "paceline_gateway_cpu_seconds",
            "Processor time of the gateway and its helpers for requests, by work.",
            ["model", "work"],
            registry=self.registry,
        )
        self.overloads = Counter(
            "paceline_overload_changes",
            "Changes to each stage of the gateway's memory.",
            ["model", "stage"],
            registry=self.registry,
        )
        self._memory = {
            name: Gauge(name, text, ["model"], registry=self.registry)
            for name, text in (
                ("paceline_gateway_memory_bytes", "Memory of the gateway and its helpers."),
                ("paceline_gateway_memory_limit_bytes", "Limit of that memory."),
                ("paceline_overload_stage", "Stage of the gateway's memory, 0 to 3."),
            )
        }
        self._lock = threading.Lock()
        self._category_names = Categories()
        self._categories: dict[str, _Category] = {}
        self._running: dict[str, _RunningRequest] = {}
        self._rounds = SpeculationCounts()
        self.registry.register(VllmCollector(model_name, self._speculation_totals))

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    @property
    def num_drafts(self) -> int:
        """Rounds with drafts since the start, over all categories."""
        return self._rounds.rounds

    def add_engine(self, status: Callable[[], EngineStatus]) -> None:
        """Adds the engine's metrics, read at every scrape."""
        self.registry.register(EngineCollector(self.model, status))

    def add_queue(self, num_choices: Callable[[], int], num_tokens: Callable[[], int]) -> None:
        """Adds the gateway's queue, read at every scrape."""
        for name, text, count in (
            ("paceline_queue_choices", "Choices in the gateway's queue.", num_choices),
            ("paceline_queue_prompt_tokens", "Prompt tokens in the gateway's queue.", num_tokens),
        ):
            Gauge(name, text, ["model"], registry=self.registry).labels(self.model).set_function(count)

    def add_memory(self, used: Callable[[], int], limit: int, stage: Callable[[], int]) -> None:
        """Adds the gateway's memory in bytes and its stage, read at every scrape."""
        for gauge, value in zip(self._memory.values(), (used, lambda: limit, stage), strict=True):
            gauge.labels(self.model).set_function(value)

    def record_overload(self, stage: OverloadStage) -> None:
        """Counts the beginning of a stage."""
        self.overloads.labels(self.model, stage.name.lower()).inc()

    def record_cpu(self, work: str, seconds: float) -> None:
        """Counts processor time. `work` is body, template, text or schema. Any thread may call it."""
        self.cpu.labels(self.model, work).inc(seconds)

    def add_cluster(self, status: Callable[[], ClusterStatus]) -> None:
        """Adds the metrics of the workers, read at every scrape."""
        self.registry.register(ClusterCollector(self.model, status, self.tokens_per_second))

    def tokens_per_second(self) -> float:
        """Committed tokens of all categories over the last minute, or since the start."""
        now = self.clock()
        return self._recent_tokens.per_second(now) * COST_WINDOW / min(COST_WINDOW, max(1.0, now - self._started))

    def render(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)

    def record_submit(self, request: Request) -> None:
        self._running[request.id] = _RunningRequest(self.clock())
        self._category(request).prompt_tokens.inc(len(request.prompt_ids))

    def record_outputs(self, outputs: Sequence[tuple[Request, StepOutput]], now: float) -> None:
        """Counts outputs of any requests that arrived together."""
        by_category: dict[_Category, list[StepOutput]] = {}
        for request, output in outputs:
            category = self._category(request)
            by_category.setdefault(category, []).append(output)
            self._record_times(category, self._running[request.id], output, now)
        for category, own in by_category.items():
            count = sum([len(output.tokens) for output in own])
            category.generated.inc(count)
            category.recent.add(count, now)
            self._recent_tokens.add(count, now)
            rounds = [output for output in own if output.drafted]
            if rounds:
                category.record_rounds(rounds)
                for output in rounds:
                    self._rounds.add(output.drafted, output.accepted)

    def _record_times(self, category: _Category, running: _RunningRequest, output: StepOutput, now: float) -> None:
        choice = running.choices.get(output.choice)
        if choice is None:
            if not running.choices:
                category.first_token.observe(now - running.started)
                self.recent_first_token.add(now - running.started, now)
                category.cached_tokens.inc(output.num_cached)
            choice = running.choices[output.choice] = _ChoiceTimes(now)
            category.queue.observe(output.waited)
        else:
            choice.later_tokens += len(output.tokens)
        if output.finish_reason is not None and choice.later_tokens:
            seconds = (now - choice.first_token) / choice.later_tokens
            category.per_token.observe(seconds)
            self.recent_per_token.add(seconds, now)

    def record_finish(self, request: Request, reason: str, now: float) -> None:
        """`reason` is stop, length, cancelled or error."""
        category, running = self._category(request), self._running.pop(request.id)
        category.requests[reason].inc()
        category.duration.observe(now - running.started)

    def record_rejection(self, reason: str) -> None:
        """Counts a request that did not reach the engine. `reason` is one of a few fixed words, such as `overloaded`."""
        self.rejections.labels(self.model, reason).inc()

    def _speculation_totals(self) -> SpeculationTotals:
        counts = self._rounds
        accepted_at_least = itertools.accumulate(reversed(counts.histogram[1:]))
        return SpeculationTotals(counts.rounds, counts.drafted, counts.accepted, [*accepted_at_least][::-1])

    def _category(self, request: Request) -> _Category:
        series = self._categories.get(request.category)
        if series is not None:
            return series
        with self._lock:
            name = self._category_names.fold(request.category)
            series = self._categories.get(name)
            if series is None:
                series = self._categories[name] = _Category(self, name)
            return series

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"paceline_{name}", help_text, ["model", "category", *labels], registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"paceline_{name}", help_text, ["model", "category"], buckets=buckets, registry=self.registry)


class MergedRegistry(Collector):
    """Joins the series of equal families: a page may name each family once. The label `model` tells the series apart."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                family = families.setdefault(metric.name, metric)
                if family is not metric:
                    family.samples.extend(metric.samples)
        yield from families.values()


def process_registry() -> CollectorRegistry:
    """The series of the gateway's process, which all its models share: the build, and `process_*` of prometheus_client."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Info("paceline_build", "Version of Paceline and of Python.", registry=registry)
    build.info({"version": VERSION, "python": platform.python_version()})
    return registry
