"""What a target worker finds wrong with its engine: pressure on the cache, which limits speculation, slow or bad drafts, and
steps outside the CUDA graphs.

A draft pool reports the same symptoms, and that of a slow network, itself.
"""

import logging
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from operator import mul

from paceline.core.errors import PacelineError
from paceline.core.request import SpeculationFlags
from paceline.core.status import EngineStatus, Symptom, TrafficStatus
from paceline.engine import EngineLoop
from paceline.engine.step.step import GRAPH, HostReason
from paceline.policy.cost.symptoms import Measurements, SymptomWatch

logger = logging.getLogger(__name__)

FLAG_PERSISTENCE = 3
"""Observations in a row, `PRESSURE_SECONDS` apart, that start or end the limit."""
LIMITED_DEPTH = 1
"""Greatest depth while sequences are preempted for lack of cache blocks, some of which hold drafts."""
PRESSURE_SECONDS = 1.0
"""Interval of the observations of `KvPressure`."""


class KvPressure:
    """Watches preemptions per step. While they persist, `limit` bounds the depth of the operator's flags."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(FLAG_PERSISTENCE)
        self._last: tuple[int, int] | None = None

    @property
    def active(self) -> tuple[Symptom, ...]:
        return self._watch.active

    def observe(self, status: EngineStatus, steps: int) -> bool:
        """Returns whether the limit starts or ends."""
        last, now = self._last, (status.preemptions, steps)
        self._last = now
        if last is None:
            return False
        preemptions, new_steps = now[0] - last[0], now[1] - last[1]
        if not new_steps and (status.running or status.waiting):  # one long step
            return False
        rate = preemptions / new_steps if new_steps else 0.0
        was_active = bool(self.active)
        for symptom in self._watch.observe(Measurements(preemptions=rate if status.flags.enabled else 0.0)):
            logger.warning("%s", symptom)
        return bool(self.active) != was_active

    def limit(self, flags: SpeculationFlags) -> SpeculationFlags:
        if not self.active:
            return flags
        depth = LIMITED_DEPTH if flags.max_depth is None else min(LIMITED_DEPTH, flags.max_depth)
        return replace(flags, max_depth=depth)


class WorkerFlags:
    """Applies flags to the engine. The thread of the worker calls it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop, self._engine = loop, loop.engine
        self._flags, self._pressure = SpeculationFlags(), KvPressure()
        self._next_observation = 0.0

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        return tuple(self._pressure.active)

    def set(self, flags: SpeculationFlags) -> None:
        """Flags that the engine refuses are ignored with a warning."""
        try:
            self._engine.flags.validate(flags)
            self._flags = flags
            self._apply()
        except PacelineError as error:  # the gateway's configuration differs from this worker's
            logger.warning("the flags are ignored: %s", error)

    def observe(self, status: EngineStatus, now: float) -> bool:
        """Limit the flags by the pressure on the cache, once per `PRESSURE_SECONDS`. Returns whether it was time for that."""
        if now < self._next_observation:
            return False
        self._next_observation = now + PRESSURE_SECONDS
        if self._pressure.observe(status, self._engine.num_steps) and self._loop.is_running:
            self._apply()
        return True

    def _apply(self) -> None:
        flags = self._pressure.limit(self._flags)
        self._loop.call(lambda: self._engine.flags.apply(flags))


LEAST_STEPS = 256
"""Steps of which the share on the host is computed."""


class HostSteps:
    """Watches how many steps of an engine with CUDA graphs run on the host."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(persistence=2)
        self._last = Counter[str]()

    @property
    def active(self) -> tuple[Symptom, ...]:
        return self._watch.active

    def observe(self, status: EngineStatus) -> None:
        """Count since the last observation of so many steps. The first step after an idle time does not count."""
        steps = Counter(status.executor_steps) - self._last
        del steps[HostReason.IDLE]
        if steps.total() < LEAST_STEPS:
            return
        self._last = Counter(status.executor_steps)
        on_host = Counter({reason: count for reason, count in steps.items() if reason != GRAPH})
        if HostReason.NO_GRAPHS in on_host:
            return
        ((reason, _),) = on_host.most_common(1) or [("", 0)]
        for symptom in self._watch.observe(
            Measurements(host_share=on_host.total() / steps.total(), host_reason=str(reason))
        ):
            logger.warning("%s", symptom)


SYMPTOM_PERSISTENCE = 3
"""Observations in a row, about a second apart, that start or end a symptom."""


class DraftSymptoms:
    """Watches acceptance and times of an engine's own proposers."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(SYMPTOM_PERSISTENCE)
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
