"""What the engine itself knows, read when somebody scrapes."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.worker_status import BreakerState, EngineStatus

BREAKER = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

SINGLE: tuple[tuple[type[Metric], str, str, Callable[[EngineStatus], float]], ...] = (
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
    (
        CounterMetricFamily,
        "audited_tokens",
        "Tokens of finished texts computed again by plain decoding.",
        lambda s: s.audit.audited,
    ),
    (
        CounterMetricFamily,
        "audit_drifted_tokens",
        "Of them, those that plain decoding would not have said, beyond rounding. More than 0 is an alarm.",
        lambda s: s.audit.drifted,
    ),
    (
        CounterMetricFamily,
        "audit_dropped_texts",
        "Texts that were to be audited and found no idle moment.",
        lambda s: s.audit.dropped,
    ),
)
"""One value a model."""


class EngineCollector(Collector):
    def __init__(self, model: str, snapshot: Callable[[], EngineStatus]) -> None:
        self._model = model
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot()
        for family, name, help_text, value in SINGLE:
            metric = family(f"paceline_{name}", help_text, labels=["model"])  # type: ignore[call-arg]
            metric.add_metric([self._model], value(snapshot))  # type: ignore[attr-defined]
            yield metric
        yield from self._time(snapshot)
        yield from self._tiers(snapshot)
        yield from self._traffic(snapshot)

    def _time(self, snapshot: EngineStatus) -> Iterator[Metric]:
        seconds = CounterMetricFamily(
            "paceline_step_seconds",
            "Seconds of steps: draft, network and verify of those that drafted, plain, and prompt.",
            labels=["model", "part"],
        )
        for part, value in snapshot.seconds.items():
            seconds.add_metric([self._model, part], value)
        gain = GaugeMetricFamily(
            "paceline_speculation_gain",
            "Speed of speculation over plain decoding, expected from measured acceptance and times.",
            labels=["model"],
        )
        if snapshot.advantage is not None:
            gain.add_metric([self._model], snapshot.advantage)
        yield from (seconds, gain)

    def _tiers(self, snapshot: EngineStatus) -> Iterator[Metric]:
        tiers = snapshot.tiers
        if tiers is None:
            return
        blocks = GaugeMetricFamily(
            "paceline_kv_tier_blocks", "Cached blocks below the device.", labels=["model", "tier"]
        )
        blocks.add_metric([self._model, "host"], tiers.host_blocks)
        blocks.add_metric([self._model, "disk"], tiers.disk_blocks)
        hits = CounterMetricFamily(
            "paceline_kv_tier_hit_tokens", "Tokens that were found there and not computed.", labels=["model", "tier"]
        )
        hits.add_metric([self._model, "device"], tiers.device_hits)
        hits.add_metric([self._model, "host"], tiers.host_hits)
        hits.add_metric([self._model, "disk"], tiers.disk_hits)
        moved = CounterMetricFamily(
            "paceline_kv_tier_bytes",
            "Bytes moved into a tier (down) and back up from it.",
            labels=["model", "tier", "way"],
        )
        moved.add_metric([self._model, "host", "down"], tiers.bytes_to_host)
        moved.add_metric([self._model, "host", "up"], tiers.bytes_from_host)
        moved.add_metric([self._model, "disk", "down"], tiers.bytes_to_disk)
        moved.add_metric([self._model, "disk", "up"], tiers.bytes_from_disk)
        bad = CounterMetricFamily(
            "paceline_kv_tier_bad_blocks", "Blocks on disk that were damaged, and computed again.", labels=["model"]
        )
        bad.add_metric([self._model], tiers.bad_blocks)
        dropped = CounterMetricFamily(
            "paceline_kv_tier_dropped_blocks",
            "Blocks that no tier had room for, or the disk did not take.",
            labels=["model"],
        )
        dropped.add_metric([self._model], tiers.dropped_blocks)
        yield from (blocks, hits, moved, bad, dropped)

    def _traffic(self, snapshot: EngineStatus) -> Iterator[Metric]:
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
        tested = CounterMetricFamily(
            "paceline_tested_drafts",
            "Drafted tokens whose fate was decided: accepted, or first rejected.",
            labels=labels,
        )
        kept = CounterMetricFamily("paceline_kept_drafts", "Of them, accepted: kept / tested is alpha.", labels=labels)
        drifts = CounterMetricFamily("paceline_drifts", "Changes of acceptance that were found.", labels=labels)
        levels = GaugeMetricFamily(
            "paceline_drift_level",
            "Acceptance of first drafts before and after the last change.",
            labels=[*labels, "side"],
        )
        for report in snapshot.traffic:
            values = [self._model, report.method, report.category]
            tested.add_metric(values, report.tested)
            kept.add_metric(values, report.kept)
            drifts.add_metric(values, report.drifts)
            for side, level in zip(("before", "after"), report.drift or (), strict=False):
                levels.add_metric([*values, side], level)
            for position, one in enumerate(report.alphas, start=1):
                alpha.add_metric([*values, str(position)], one)
            depth.add_metric(values, report.mean_depth)
            breaker.add_metric(values, BREAKER[report.breaker])
            for reason, count in report.fallbacks.items():
                fallbacks.add_metric([*values, reason], count)
        yield from (alpha, depth, breaker, fallbacks, tested, kept, drifts, levels)
