"""Metrics of workers, read at every scrape."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.status import ClusterStatus, HandoffCounts, WorkerStatus
from paceline.policy.cost.cost import dollars_per_hour, recent_cost

WORKER_LABELS = ["model", "worker", "role"]


def _from_handoffs(count: Callable[[HandoffCounts], float]) -> Callable[[WorkerStatus], float | None]:
    return lambda w: None if w.handoffs is None else count(w.handoffs)


WORKER_METRICS: tuple[tuple[type[Metric], str, str, Callable[[WorkerStatus], float | None]], ...] = (
    (GaugeMetricFamily, "worker_ready", "1 while the worker is ready.", lambda w: float(w.state == "ready")),
    (CounterMetricFamily, "worker_restarts", "Restarts of the worker's process.", lambda w: w.life.restarts),
    (
        GaugeMetricFamily,
        "worker_start_time_seconds",
        "Time of the last start of the worker's process, since 1970.",
        lambda w: w.life.started,
    ),
    (GaugeMetricFamily, "worker_sequences_running", "Sequences in the worker's batch.", lambda w: w.running),
    (GaugeMetricFamily, "worker_sequences_waiting", "Sequences waiting at the worker.", lambda w: w.waiting),
    (
        GaugeMetricFamily,
        "worker_queue_seconds",
        "Queued drafting time of a draft worker; queued prefill time of a target, as the router estimates it.",
        lambda w: w.queue_seconds,
    ),
    (GaugeMetricFamily, "worker_kv_use_ratio", "Used share of the worker's KV cache, 0 to 1.", lambda w: w.kv_use),
    (
        GaugeMetricFamily,
        "worker_round_trip_seconds",
        "Recent round trip between gateway and target, or targets and draft worker.",
        lambda w: w.round_trip,
    ),
    (
        CounterMetricFamily,
        "worker_prompt_tokens",
        "Prompt tokens of the requests that a target started.",
        lambda w: w.prompt_tokens if w.role == "target" else None,
    ),
    (
        CounterMetricFamily,
        "worker_cached_prompt_tokens",
        "Prompt tokens, of those, that the target found in its prefix cache.",
        lambda w: w.cached_tokens if w.role == "target" else None,
    ),
    (
        GaugeMetricFamily,
        "worker_indexed_blocks",
        "Cached blocks of the worker in the router's index.",
        lambda w: w.indexed_blocks,
    ),
    (
        GaugeMetricFamily,
        "worker_prefill_seconds_per_token",
        "Prefill time per prompt token, as the router measured it.",
        lambda w: w.prefill_seconds,
    ),
    (GaugeMetricFamily, "worker_depth", "Recent mean depth of the worker.", lambda w: w.depth),
    (GaugeMetricFamily, "worker_alpha", "Recent acceptance per position, averaged over positions.", lambda w: w.alpha),
    (
        CounterMetricFamily,
        "worker_generated_tokens",
        "Tokens that a target generated for this gateway.",
        lambda w: w.tokens if w.role == "target" else None,
    ),
    (
        CounterMetricFamily,
        "worker_preemptions",
        "Sequences preempted for lack of cache blocks.",
        lambda w: w.preemptions if w.role == "target" else None,
    ),
    (
        GaugeMetricFamily,
        "worker_draft_pass_seconds",
        "Recent time of one pass over the draft model.",
        lambda w: w.pass_seconds,
    ),
    (CounterMetricFamily, "worker_draft_answers", "Rounds that the draft worker drafted.", lambda w: w.answers),
    (
        CounterMetricFamily,
        "worker_prespeculation_hits",
        "Rounds drafted before the target requested them.",
        lambda w: w.hits,
    ),
    (
        GaugeMetricFamily,
        "worker_drafts_ahead",
        "1 while the draft worker drafts ahead, 0 if it stopped because too few drafts were used.",
        lambda w: float(w.paused_share is None) if w.role == "draft" and w.answers else None,
    ),
    (CounterMetricFamily, "worker_late_drafts", "Rounds whose draft missed the deadline.", lambda w: w.late),
    (
        CounterMetricFamily,
        "worker_handoffs",
        "Hand-offs: prompts that a target received, or that a prefill worker sent.",
        _from_handoffs(lambda counts: counts.done),
    ),
    (
        CounterMetricFamily,
        "worker_failed_handoffs",
        "Failed hand-offs; the target computed the prompt itself.",
        _from_handoffs(lambda counts: counts.failed),
    ),
    (
        CounterMetricFamily,
        "worker_handoff_tokens",
        "Tokens of hand-offs.",
        _from_handoffs(lambda counts: counts.tokens),
    ),
    (
        CounterMetricFamily,
        "worker_handoff_bytes",
        "Bytes of hand-offs.",
        _from_handoffs(lambda counts: counts.bytes),
    ),
    (
        CounterMetricFamily,
        "worker_handoff_in_place_bytes",
        "Bytes of hand-offs that were copied from device memory to device memory.",
        _from_handoffs(lambda counts: counts.in_place_bytes),
    ),
    (
        CounterMetricFamily,
        "worker_handoff_seconds",
        "Total time of hand-offs, from request to last byte.",
        _from_handoffs(lambda counts: counts.seconds),
    ),
    (
        CounterMetricFamily,
        "worker_peer_tokens",
        "Prompt tokens that a target received from another target's cache.",
        _from_handoffs(lambda counts: counts.peer_tokens),
    ),
)


class ClusterCollector(Collector):
    """Reads the status of all workers at every scrape."""

    def __init__(
        self, model: str, status: Callable[[], ClusterStatus], tokens_per_second: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`tokens_per_second` returns the recent rate of all workers together."""
        self._model = model
        self._status, self._tokens_per_second = status, tokens_per_second

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        workers = status.workers
        continued = CounterMetricFamily(
            "paceline_continued_streams", "Streams continued on another worker.", labels=["model"]
        )
        continued.add_metric([self._model], status.continued)
        yield continued
        yield from self._cost(workers)
        for family, name, help_text, value in WORKER_METRICS:
            metric = family(f"paceline_{name}", help_text, labels=WORKER_LABELS)  # type: ignore[call-arg]
            for worker in workers:
                number = value(worker)
                if number is not None:
                    metric.add_metric([self._model, worker.name, worker.role], number)  # type: ignore[attr-defined]
            yield metric
        symptoms = GaugeMetricFamily(
            "paceline_symptom", "1 while the worker shows this symptom.", labels=[*WORKER_LABELS, "symptom"]
        )
        for worker in workers:
            for symptom in worker.symptoms:
                symptoms.add_metric([self._model, worker.name, worker.role, symptom.name], 1.0)
        exits = GaugeMetricFamily(
            "paceline_worker_last_exit",
            "1 for the reason of the last exit of the worker's process.",
            labels=[*WORKER_LABELS, "reason"],
        )
        for worker in workers:
            if worker.life.last_exit:
                reason = worker.life.last_exit.partition(" (")[0]  # a bounded label: a signal or a status
                exits.add_metric([self._model, worker.name, worker.role, reason], 1.0)
        yield from (symptoms, exits)

    def _cost(self, workers: Sequence[WorkerStatus]) -> Iterator[Metric]:
        for name, text, dollars in (
            ("dollars_per_hour", "Price of all workers.", dollars_per_hour(workers)),
            (
                "dollars_per_million_tokens",
                "Price of all workers per million tokens generated, over the last minute.",
                recent_cost(workers, self._tokens_per_second()),
            ),
        ):
            metric = GaugeMetricFamily(f"paceline_{name}", text, labels=["model"])
            if dollars is not None:
                metric.add_metric([self._model], dollars)
            yield metric
