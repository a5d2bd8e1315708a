"""What the engine itself knows, read when somebody scrapes."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.engine.snapshot import EngineSnapshot
from paceline.speculation.breaker import BreakerState

BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

SINGLE: tuple[tuple[type[Metric], str, str, Callable[[EngineSnapshot], float]], ...] = (
    (GaugeMetricFamily, "sequences_running", "Sequences with a seat in the batch.", lambda s: s.running),
    (GaugeMetricFamily, "sequences_waiting", "Sequences waiting for a seat.", lambda s: s.waiting),
    (GaugeMetricFamily, "kv_blocks_used", "Cache blocks held by sequences.", lambda s: s.kv_used),
    (GaugeMetricFamily, "kv_blocks_total", "Cache blocks there are.", lambda s: s.kv_total),
    (GaugeMetricFamily, "kv_use_ratio", "Used share of the cache, 0 to 1.", lambda s: s.kv_used / s.kv_total),
    (
        GaugeMetricFamily,
        "speculation_enabled",
        "1 while the server speculates, 0 while it does not.",
        lambda s: float(bool(s.flags.enabled)),
    ),
    (
        GaugeMetricFamily,
        "max_depth",
        "Drafted tokens a round at the most, as configured and flagged.",
        lambda s: s.flags.max_depth or 0,
    ),
    (
        CounterMetricFamily,
        "preemptions",
        "Sequences that lost their seat for lack of cache blocks.",
        lambda s: s.preemptions,
    ),
    (CounterMetricFamily, "invalid_drafts", "Drafts dropped because they were malformed.", lambda s: s.invalid_drafts),
)
"""One value a model."""


class EngineCollector(Collector):
    def __init__(self, model: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._model = model
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        for family, name, help_text, value in SINGLE:
            metric = family(f"paceline_{name}", help_text, labels=["model"])  # type: ignore[call-arg]
            metric.add_metric([self._model], value(snapshot))  # type: ignore[attr-defined]
            yield metric
        yield from self._traffic(snapshot)

    def _traffic(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        labels = ["model", "method", "category"]
        alpha = GaugeMetricFamily(
            "paceline_alpha",
            "Recent conditional acceptance: of the drafts at this position that were tested, the share accepted.",
            labels=[*labels, "position"],
        )
        depth = GaugeMetricFamily("paceline_depth", "Recent mean depth decided, zeros included.", labels=labels)
        breaker = GaugeMetricFamily(
            "paceline_breaker_state", "Circuit breaker: 0 closed, 1 half open, 2 open.", labels=labels
        )
        fallbacks = CounterMetricFamily(
            "paceline_fallbacks",
            "Sequence-steps decoded plainly although speculation was on; reasons: declined, breaker, no_room, no_draft.",
            labels=[*labels, "reason"],
        )
        for report in snapshot.traffic:
            values = [self._model, report.method, report.category]
            for position, one in enumerate(report.alphas, start=1):
                alpha.add_metric([*values, str(position)], one)
            depth.add_metric(values, report.mean_depth)
            breaker.add_metric(values, BREAKER[report.breaker])
            for reason, count in report.fallbacks.items():
                fallbacks.add_metric([*values, reason], count)
        yield from (alpha, depth, breaker, fallbacks)
