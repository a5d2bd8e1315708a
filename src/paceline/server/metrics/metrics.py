"""Prometheus metrics. Their names are a promise: see docs/metrics.md.

Labels are bounded: a model, a few outcomes and reasons, at most 32 positions, and the first 32 categories; further
categories are counted as `other`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.errors import MissingDependency
from paceline.core.output import StepOutput
from paceline.core.request import Categories, Request
from paceline.core.worker_status import ClusterStatus
from paceline.engine.stats.snapshot import EngineSnapshot
from paceline.server.dashboard.recent_values import RecentValues
from paceline.server.metrics.recent import RecentRate

try:
    import prometheus_client
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
except ImportError:
    raise MissingDependency("prometheus-client", "the server", "server") from None

from paceline.server.metrics.cluster_metrics import ClusterCollector
from paceline.server.metrics.engine_metrics import EngineCollector

LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
DURATION = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
_KEEP = 1.0 - 1.0 / 128.0


@dataclass(slots=True)
class _Choice:
    first: float
    later_tokens: int = 0


@dataclass(slots=True)
class _Flight:
    """A request that is not finished."""

    started: float
    choices: dict[int, _Choice] = field(default_factory=dict)


class _Category:
    """The series of one category, found once: labels cost more than counting."""

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
        self._recent_drafted = self._recent_accepted = 0.0

    def round(self, drafted: int, accepted: int) -> None:
        self.rounds.inc()
        self.drafted.inc(drafted)
        self.accepted.inc(accepted)
        self.depth.observe(drafted)
        if accepted > len(self._positions):
            self._positions = [self._by_position.labels(*self._labels, str(i)) for i in range(1, accepted + 1)]
        for series in self._positions[:accepted]:
            series.inc()
        self._recent_drafted = _KEEP * self._recent_drafted + drafted
        self._recent_accepted = _KEEP * self._recent_accepted + accepted
        self.rate.set(self._recent_accepted / self._recent_drafted)


class Metrics:
    """Counts what requests do. `submitted`, then `output` for each step, then `finished`. Times are `clock`'s, in seconds;
    event loops use the same one.

    The calls for one request come one after another; those for different ones, and `render`, from any thread.
    """

    def __init__(self, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.model = model_name
        self.clock = clock
        self.registry = CollectorRegistry()
        labels = ["model", "category"]
        self.requests = self._counter("requests", "Finished requests: stop, length, cancelled, error.", "outcome")
        self.rejections = Counter(
            "paceline_rejected",
            "Requests refused before they reached the engine, by reason.",
            ["model", "reason"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of submitted requests.")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens that the prefix cache supplied.")
        self.generated = self._counter("generated_tokens", "Tokens committed.")
        self.drafted = self._counter("drafted_tokens", "Tokens drafted.")
        self.accepted = self._counter("accepted_tokens", "Drafted tokens accepted.")
        self.by_position = self._counter(
            "accepted_tokens_by_position", "Drafted tokens accepted, by position in the draft, from 1.", "position"
        )
        self.rounds = self._counter("rounds", "Draft-and-verify rounds of single sequences.")
        self.draft_depth = self._histogram("draft_depth", "Tokens drafted a round.", DEPTHS)
        self.acceptance_rate = Gauge(
            "paceline_draft_acceptance_rate",
            "Accepted / drafted tokens over about the last 128 rounds.",
            labels,
            registry=self.registry,
        )
        self.speed = Gauge(
            "paceline_effective_tokens_per_second",
            "Tokens committed a second, over the last 10 seconds.",
            labels,
            registry=self.registry,
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", LATENCY)
        self.queue = self._histogram("queue_seconds", "Of one choice: from arrival at the engine to a seat.", LATENCY)
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Of one choice: first to last token, a token.", PER_TOKEN
        )
        self.recent_first_token, self.recent_per_token = RecentValues(), RecentValues()
        self.duration = self._histogram("request_duration_seconds", "From arrival to the end.", DURATION)
        self._lock = threading.Lock()
        self._folded = Categories()
        self._categories: dict[str, _Category] = {}
        self._flights: dict[str, _Flight] = {}

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def bind(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        """Read the engine's own figures from `snapshot` at every scrape."""
        self.registry.register(EngineCollector(self.model, snapshot))

    def bind_cluster(self, status: Callable[[], ClusterStatus | None]) -> None:
        """And those of a cluster, where there is one."""
        self.registry.register(ClusterCollector(self.model, status))

    def render(self) -> bytes:
        return prometheus_client.generate_latest(self.registry)

    def submitted(self, request: Request) -> None:
        self._flights[request.id] = _Flight(self.clock())
        self._category(request).prompt_tokens.inc(len(request.prompt_ids))

    def output(self, request: Request, output: StepOutput, now: float) -> None:
        category, flight, count = self._category(request), self._flights[request.id], len(output.tokens)
        category.generated.inc(count)
        category.recent.add(count, now)
        if output.drafted:
            category.round(output.drafted, output.accepted)
        choice = flight.choices.get(output.choice)
        if choice is None:
            if not flight.choices:
                category.first_token.observe(now - flight.started)
                self.recent_first_token.add(now - flight.started, now)
                category.cached_tokens.inc(output.num_cached)
            choice = flight.choices[output.choice] = _Choice(now)
            category.queue.observe(output.waited)
        else:
            choice.later_tokens += count
        if output.finish_reason is not None and choice.later_tokens:
            seconds = (now - choice.first) / choice.later_tokens
            category.per_token.observe(seconds)
            self.recent_per_token.add(seconds, now)

    def finished(self, request: Request, reason: str, now: float) -> None:
        """`reason`: stop, length, cancelled or error."""
        category, flight = self._category(request), self._flights.pop(request.id)
        category.requests[reason].inc()
        category.duration.observe(now - flight.started)

    def rejected(self, reason: str) -> None:
        """A request that never reached the engine. Reasons are a few fixed words, such as `overloaded`."""
        self.rejections.labels(self.model, reason).inc()

    def _category(self, request: Request) -> _Category:
        found = self._categories.get(request.category)
        if found is not None:
            return found
        with self._lock:
            name = self._folded.fold(request.category)
            found = self._categories.get(name)
            if found is None:
                found = self._categories[name] = _Category(self, name)
            return found

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"paceline_{name}", help_text, ["model", "category", *labels], registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"paceline_{name}", help_text, ["model", "category"], buckets=buckets, registry=self.registry)
