"""vLLM's counters of speculative decoding: `vllm bench serve` prints acceptance from them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

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
