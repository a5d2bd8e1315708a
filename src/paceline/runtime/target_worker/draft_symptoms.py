"""Failure modes of drafting inside an engine: low acceptance, and drafts that take longer than verification.

A draft pool reports the same symptoms, and that of a slow network, itself.
"""

import logging
from itertools import accumulate
from operator import mul

from paceline.cluster.cost.symptoms import Measurements, SymptomWatch
from paceline.core.status.engine import EngineStatus, Symptom, TrafficStatus

logger = logging.getLogger(__name__)

PERSISTENCE = 3
"""Observations in a row, about a second apart, that start or end a symptom."""


class DraftSymptoms:
    """Watches acceptance and times of an engine's own proposers."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(PERSISTENCE)
        self._last: EngineStatus | None = None

    @property
    def active(self) -> tuple[Symptom, ...]:
        return self._watch.active

    def observe(self, status: EngineStatus) -> None:
        """Compare with the status of the last call; the log has a line for each new symptom."""
        last, self._last = self._last, status
        if last is None or not _num_tested(last) < _num_tested(status):  # no drafts: what is known stays
            return
        for symptom in self._watch.observe(_measure(last, status)):
            logger.warning("%s", symptom)


def _measure(last: EngineStatus, now: EngineStatus) -> Measurements:
    """Measurements of the rounds between two reports."""
    before = {(traffic.method, traffic.category): traffic.tested for traffic in last.traffic}
    grown = [(traffic, traffic.tested - before.get((traffic.method, traffic.category), 0)) for traffic in now.traffic]
    weights = [(traffic, count) for traffic, count in grown if count > 0]
    total = sum(count for _, count in weights)
    draft, verify = (now.seconds.get(part, 0.0) - last.seconds.get(part, 0.0) for part in ("draft", "verify"))
    return Measurements(
        accepted=sum(count * _accepted(traffic) for traffic, count in weights) / total,
        depth=sum(count * traffic.mean_depth for traffic, count in weights) / total,
        draft_seconds=draft if verify > 0 else None,
        verify_seconds=verify if verify > 0 else None,
    )


def _accepted(traffic: TrafficStatus) -> float:
    """Expected accepted drafts of a round, from the acceptance of each position."""
    return sum(accumulate(traffic.alphas, mul))


def _num_tested(status: EngineStatus) -> int:
    return sum(traffic.tested for traffic in status.traffic)
