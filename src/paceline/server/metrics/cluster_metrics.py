"""The workers of a cluster, read when somebody scrapes."""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.worker_status import ClusterStatus, HandoffCounts, WorkerStatus

WORKER = ["model", "worker", "role"]


def _of_handoffs(count: Callable[[HandoffCounts], float]) -> Callable[[WorkerStatus], float | None]:
    return lambda w: None if w.handoffs is None else count(w.handoffs)


VALUES: tuple[tuple[type[Metric], str, str, Callable[[WorkerStatus], float | None]], ...] = (
    (GaugeMetricFamily, "worker_ready", "1 while the worker is ready for work.", lambda w: float(w.state == "ready")),
    (GaugeMetricFamily, "worker_sequences_running", "Sequences with a seat there.", lambda w: w.running),
    (GaugeMetricFamily, "worker_sequences_waiting", "Sequences that wait there.", lambda w: w.waiting),
    (
        GaugeMetricFamily,
        "worker_queue_seconds",
        "Drafting that waits there; prefill, as the router expects, at a target.",
        lambda w: w.queue_seconds,
    ),
    (GaugeMetricFamily, "worker_kv_use_ratio", "Used share of its cache, 0 to 1.", lambda w: w.kv_use),
    (
        GaugeMetricFamily,
        "worker_round_trip_seconds",
        "Recent round trip: gateway to target, targets to draft worker.",
        lambda w: w.round_trip,
    ),
    (
        CounterMetricFamily,
        "worker_prompt_tokens",
        "Prompt tokens of the requests that a target began to answer.",
        lambda w: w.prompt_tokens if w.role == "target" else None,
    ),
    (
        CounterMetricFamily,
        "worker_cached_prompt_tokens",
        "Of them, those its prefix cache supplied.",
        lambda w: w.cached_tokens if w.role == "target" else None,
    ),
    (
        GaugeMetricFamily,
        "worker_indexed_blocks",
        "Cache blocks of the worker that the router knows of.",
        lambda w: w.indexed_blocks,
    ),
    (
        GaugeMetricFamily,
        "worker_prefill_seconds_per_token",
        "To compute a token of a prompt there, as the router measured it.",
        lambda w: w.prefill_seconds,
    ),
    (GaugeMetricFamily, "worker_depth", "Recent mean depth.", lambda w: w.depth),
    (GaugeMetricFamily, "worker_alpha", "Recent acceptance per position, averaged.", lambda w: w.alpha),
    (
        CounterMetricFamily,
        "worker_generated_tokens",
        "Tokens that a target generated for this gateway.",
        lambda w: w.tokens if w.role == "target" else None,
    ),
    (
        CounterMetricFamily,
        "worker_preemptions",
        "Sequences that lost their seat there for lack of cache blocks.",
        lambda w: w.preemptions if w.role == "target" else None,
    ),
    (
        GaugeMetricFamily,
        "worker_draft_pass_seconds",
        "One pass over a draft's model, of late.",
        lambda w: w.pass_seconds,
    ),
    (CounterMetricFamily, "worker_draft_answers", "Rounds drafted remotely.", lambda w: w.answers),
    (
        CounterMetricFamily,
        "worker_prespeculation_hits",
        "Rounds that had been drafted before they were asked for.",
        lambda w: w.hits,
    ),
    (
        GaugeMetricFamily,
        "worker_drafts_ahead",
        "1 while a draft worker drafts ahead, 0 when it has stopped because too little was ready.",
        lambda w: float(w.resting is None) if w.role == "draft" and w.answers else None,
    ),
    (CounterMetricFamily, "worker_late_drafts", "Rounds whose draft came too late.", lambda w: w.late),
    (
        CounterMetricFamily,
        "worker_handoffs",
        "Prompts that a prefill worker computed: taken by a target, given by a prefill worker.",
        _of_handoffs(lambda counts: counts.done),
    ),
    (
        CounterMetricFamily,
        "worker_failed_handoffs",
        "Prompts that were to be handed over, and were computed by the target after all.",
        _of_handoffs(lambda counts: counts.failed),
    ),
    (
        CounterMetricFamily,
        "worker_handoff_tokens",
        "Tokens of prompts that were handed over.",
        _of_handoffs(lambda counts: counts.tokens),
    ),
    (
        CounterMetricFamily,
        "worker_handoff_bytes",
        "Bytes of prompts that were handed over.",
        _of_handoffs(lambda counts: counts.bytes),
    ),
    (
        CounterMetricFamily,
        "worker_handoff_seconds",
        "From asking for prompts to having them, added up.",
        _of_handoffs(lambda counts: counts.seconds),
    ),
    (
        CounterMetricFamily,
        "worker_peer_tokens",
        "Tokens of prompts that a target took from another target's cache.",
        _of_handoffs(lambda counts: counts.peer_tokens),
    ),
)


class ClusterCollector(Collector):
    def __init__(self, model: str, status: Callable[[], ClusterStatus | None]) -> None:
        self._model = model
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        if status is None:
            return
        workers = status.workers
        continued = CounterMetricFamily(
            "paceline_continued_streams", "Streams that were continued on another worker.", labels=["model"]
        )
        continued.add_metric([self._model], status.continued)
        yield continued
        for family, name, help_text, value in VALUES:
            metric = family(f"paceline_{name}", help_text, labels=WORKER)  # type: ignore[call-arg]
            for worker in workers:
                one = value(worker)
                if one is not None:
                    metric.add_metric([self._model, worker.name, worker.role], one)  # type: ignore[attr-defined]
            yield metric
        symptoms = GaugeMetricFamily(
            "paceline_symptom", "1 while a failure mode of speculation is seen.", labels=[*WORKER, "symptom"]
        )
        for worker in workers:
            for symptom in worker.symptoms:
                symptoms.add_metric([self._model, worker.name, worker.role, symptom.name], 1.0)
        yield symptoms
