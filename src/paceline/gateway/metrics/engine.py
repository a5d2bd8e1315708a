"""Metrics of the engine, read at every scrape.

`VllmCollector` has vLLM's counters of speculative decoding: `vllm bench serve` prints acceptance from them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.status import BreakerState, EngineStatus

BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

ENGINE_METRICS: tuple[tuple[type[Metric], str, str, Callable[[EngineStatus], float]], ...] = (
    (GaugeMetricFamily, "sequences_running", "Sequences in the batch.", lambda s: s.running),
    (GaugeMetricFamily, "sequences_waiting", "Sequences waiting for a place in the batch.", lambda s: s.waiting),
    (GaugeMetricFamily, "kv_blocks_used", "Cache blocks held by sequences.", lambda s: s.kv_used),
    (GaugeMetricFamily, "kv_blocks_total", "Cache blocks in total.", lambda s: s.kv_total),
    (GaugeMetricFamily, "kv_use_ratio", "Used share of the KV cache, 0 to 1.", lambda s: s.kv_used / s.kv_total),
    (
        GaugeMetricFamily,
        "speculation_enabled",
        "1 while speculation is on, 0 while it is off.",
        lambda s: float(bool(s.flags.enabled)),
    ),
    (
        GaugeMetricFamily,
        "max_depth",
        "Maximum depth from configuration and flags.",
        lambda s: s.flags.max_depth or 0,
    ),
    (
        CounterMetricFamily,
        "preemptions",
        "Sequences preempted for lack of cache blocks.",
        lambda s: s.preemptions,
    ),
    (CounterMetricFamily, "invalid_drafts", "Drafts dropped because they were malformed.", lambda s: s.invalid_drafts),
    (
        CounterMetricFamily,
        "audited_tokens",
        "Output tokens computed again by plain decoding.",
        lambda s: s.audit.audited,
    ),
    (
        CounterMetricFamily,
        "audit_drifted_tokens",
        "Audited tokens that plain decoding would not generate, beyond rounding. Any value above 0 is an error.",
        lambda s: s.audit.drifted,
    ),
    (
        CounterMetricFamily,
        "audit_dropped_texts",
        "Outputs selected for the audit and dropped for lack of time or of cache blocks.",
        lambda s: s.audit.dropped,
    ),
    (CounterMetricFamily, "audited_texts", "Outputs that the audit has compared.", lambda s: s.audit.texts),
    (
        CounterMetricFamily,
        "audit_busy_passes",
        "Passes of the audit between steps that served requests.",
        lambda s: s.audit.busy_passes,
    ),
    (
        CounterMetricFamily,
        "audit_busy_steps",
        "Steps that served requests, as the audit counts them for its share.",
        lambda s: s.audit.busy_steps,
    ),
)
"""Metrics with one value per model."""


class EngineCollector(Collector):
    """Reads the engine status at every scrape."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        self._model = model
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for family, name, help_text, value in ENGINE_METRICS:
            metric = family(f"paceline_{name}", help_text, labels=["model"])  # type: ignore[call-arg]
            metric.add_metric([self._model], value(status))  # type: ignore[attr-defined]
            yield metric
        yield from self._step_times(status)
        yield from self._tiers(status)
        yield from self._traffic(status)

    def _step_times(self, status: EngineStatus) -> Iterator[Metric]:
        seconds = CounterMetricFamily(
            "paceline_step_seconds",
            "Time of steps by part: draft, network and verify of steps with drafts; plain; prompt.",
            labels=["model", "part"],
        )
        for part, value in status.seconds.items():
            seconds.add_metric([self._model, part], value)
        steps = CounterMetricFamily(
            "paceline_steps",
            "Steps by executor: graph, or the reason why the host executor ran them.",
            labels=["model", "executor"],
        )
        for executor, count in status.executor_steps.items():
            steps.add_metric([self._model, executor], count)
        gain = GaugeMetricFamily(
            "paceline_speculation_gain",
            "Expected speed of speculation relative to plain decoding, from measured acceptance and times.",
            labels=["model"],
        )
        if status.advantage is not None:
            gain.add_metric([self._model], status.advantage)
        yield from (seconds, steps, gain)

    def _tiers(self, status: EngineStatus) -> Iterator[Metric]:
        tiers = status.tiers
        if tiers is None:
            return
        blocks = GaugeMetricFamily(
            "paceline_kv_tier_blocks", "Cached blocks in the host and disk tiers.", labels=["model", "tier"]
        )
        blocks.add_metric([self._model, "host"], tiers.host_blocks)
        blocks.add_metric([self._model, "disk"], tiers.disk_blocks)
        hits = CounterMetricFamily(
            "paceline_kv_tier_hit_tokens", "Prompt tokens found in the tier.", labels=["model", "tier"]
        )
        hits.add_metric([self._model, "device"], tiers.device_hits)
        hits.add_metric([self._model, "host"], tiers.host_hits)
        hits.add_metric([self._model, "disk"], tiers.disk_hits)
        moved = CounterMetricFamily(
            "paceline_kv_tier_bytes",
            "Bytes moved into a tier (down) and out of it (up).",
            labels=["model", "tier", "way"],
        )
        moved.add_metric([self._model, "host", "down"], tiers.bytes_to_host)
        moved.add_metric([self._model, "host", "up"], tiers.bytes_from_host)
        moved.add_metric([self._model, "disk", "down"], tiers.bytes_to_disk)
        moved.add_metric([self._model, "disk", "up"], tiers.bytes_from_disk)
        bad = CounterMetricFamily(
            "paceline_kv_tier_bad_blocks", "Damaged blocks on disk; the engine computed them again.", labels=["model"]
        )
        bad.add_metric([self._model], tiers.bad_blocks)
        dropped = CounterMetricFamily(
            "paceline_kv_tier_dropped_blocks",
            "Blocks dropped for lack of space or after a failed write.",
            labels=["model"],
        )
        dropped.add_metric([self._model], tiers.dropped_blocks)
        yield from (blocks, hits, moved, bad, dropped)

    def _traffic(self, status: EngineStatus) -> Iterator[Metric]:
        labels = ["model", "method", "category"]
        alpha = GaugeMetricFamily(
            "paceline_alpha",
            "Recent conditional acceptance: share of the verified drafts at this position that were accepted.",
            labels=[*labels, "position"],
        )
        depth = GaugeMetricFamily("paceline_depth", "Recent mean depth, including 0.", labels=labels)
        breaker = GaugeMetricFamily(
            "paceline_breaker_state", "Circuit breaker: 0 closed, 1 half open, 2 open.", labels=labels
        )
        fallbacks = CounterMetricFamily(
            "paceline_fallbacks",
            "Sequence-steps decoded without a draft while speculation was on, by reason: declined, breaker, no_room, no_draft.",
            labels=[*labels, "reason"],
        )
        tested = CounterMetricFamily(
            "paceline_tested_drafts",
            "Drafted tokens that were accepted or first rejected.",
            labels=labels,
        )
        kept = CounterMetricFamily(
            "paceline_kept_drafts", "Tested drafts that were accepted; kept / tested is alpha.", labels=labels
        )
        drifts = CounterMetricFamily("paceline_drifts", "Detected changes of acceptance.", labels=labels)
        levels = GaugeMetricFamily(
            "paceline_drift_level",
            "Acceptance of first drafts before and after the last change.",
            labels=[*labels, "side"],
        )
        for report in status.traffic:
            values = [self._model, report.method, report.category]
            tested.add_metric(values, report.tested)
            kept.add_metric(values, report.accepted)
            drifts.add_metric(values, report.drifts)
            for side, level in zip(("before", "after"), report.drift or (), strict=False):
                levels.add_metric([*values, side], level)
            for position, rate in enumerate(report.alphas, start=1):
                alpha.add_metric([*values, str(position)], rate)
            depth.add_metric(values, report.mean_depth)
            breaker.add_metric(values, BREAKER_VALUES[report.breaker])
            for reason, count in report.fallbacks.items():
                fallbacks.add_metric([*values, reason], count)
        yield from (alpha, depth, breaker, fallbacks, tested, kept, drifts, levels)


PREFIX = "vllm:spec_decode_num_"
LABELS = ("model_name", "engine")
ENGINE = "0"
"""Value of the label `engine`. The counters cover all engines."""


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """Counts over all categories."""

    rounds: float
    drafted: float
    accepted: float
    by_position: Sequence[float]
    """Accepted tokens by position in the draft, the first at index 0."""


class VllmCollector(Collector):
    """Reads the totals at every scrape."""

    def __init__(self, model: str, totals: Callable[[], SpeculationTotals]) -> None:
        self._labels = [model, ENGINE]
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        totals = self._totals()
        for name, help_text, value in (
            ("drafts", "Rounds with drafts, as vLLM names them.", totals.rounds),
            ("draft_tokens", "Tokens drafted, as vLLM names them.", totals.drafted),
            ("accepted_tokens", "Drafted tokens accepted, as vLLM names them.", totals.accepted),
        ):
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        positions = CounterMetricFamily(
            PREFIX + "accepted_tokens_per_pos",
            "Drafted tokens accepted, by position in the draft, from 0, as vLLM names them.",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(totals.by_position):
            positions.add_metric([*self._labels, str(position)], count)
        yield positions
