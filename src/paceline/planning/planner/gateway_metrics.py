"""Observations from the metrics page of a gateway. The functions are pure."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.core.pool_config import Role
from paceline.planning import ROLES, Observation, PoolState
from paceline.planning.simulator import Objective

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

Samples = dict[str, list[tuple[Mapping[str, str], float]]]


def parse(text: str) -> Samples:
    """Samples by name, as (labels, value). Lines that are not samples are skipped."""
    found: Samples = defaultdict(list)
    for line in text.splitlines():
        matched = _LINE.match(line)
        if matched is None:
            continue
        name, labels, value = matched.groups()
        try:
            found[name].append((dict(_LABEL.findall(labels or "")), float(value)))
        except ValueError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of a gateway since its start."""

    started: float
    finished: float
    output_tokens: float
    prompt_tokens: float
    cached_tokens: float
    late: float
    """First tokens after the limit of the objective, and answers slower than its limit."""
    inflight: float


class MetricsReader:
    """Turns successive pages into observations. A gateway that restarts counts from zero: that page gives none."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._last: tuple[float, _Counts] | None = None

    def read(self, text: str, now: float) -> Observation | None:
        """None for the first page."""
        samples = parse(text)
        counts = self._counts(samples)
        before, self._last = self._last, (now, counts)
        if before is None or counts.started < before[1].started or counts.finished < before[1].finished:
            return None
        since, old = before
        finished = counts.finished - old.finished
        return Observation(
            time=now,
            seconds=now - since,
            arrivals=max(0, round(finished + counts.inflight - old.inflight)),
            prompt_tokens=round(counts.prompt_tokens - old.prompt_tokens),
            cached_tokens=round(counts.cached_tokens - old.cached_tokens),
            started=round(counts.started - old.started),
            started_tokens=round(counts.prompt_tokens - old.prompt_tokens),
            finished=round(finished),
            output_tokens=round(counts.output_tokens - old.output_tokens),
            missed=min(round(finished), max(0, round(counts.late - old.late))),
            waiting=round(_sum(samples, "paceline_queue_choices") + _sum(samples, "paceline_sequences_waiting")),
            running=round(counts.inflight),
            kv_use=_mean(samples, "paceline_worker_kv_use_ratio") or _mean(samples, "paceline_kv_use_ratio"),
            pools=self._pools(samples),
        )

    def _counts(self, samples: Samples) -> _Counts:
        inflight = ("paceline_queue_choices", "paceline_sequences_waiting", "paceline_sequences_running")
        late = _above(samples, "paceline_time_to_first_token_seconds", self._objective.ttft)
        late += _above(samples, "paceline_time_per_output_token_seconds", self._objective.tpot)
        return _Counts(
            started=_sum(samples, "paceline_time_to_first_token_seconds_count"),
            finished=_sum(samples, "paceline_requests_total"),
            output_tokens=_sum(samples, "paceline_generated_tokens_total"),
            prompt_tokens=_sum(samples, "paceline_prompt_tokens_total"),
            cached_tokens=_sum(samples, "paceline_cached_prompt_tokens_total"),
            late=late,
            inflight=sum(_sum(samples, name) for name in inflight),
        )

    @staticmethod
    def _pools(samples: Samples) -> dict[Role, PoolState]:
        """Ready workers by role; a server without a cluster is one target worker."""
        ready: dict[str, int] = defaultdict(int)
        for labels, value in samples["paceline_worker_ready"]:
            ready[labels.get("role", "")] += round(value)
        return {role: PoolState(ready[role]) for role in ROLES if role in ready} or {"target": PoolState(ready=1)}


def with_wanted(seen: Observation, wanted: Mapping[Role, int]) -> Observation:
    """The observation with the workers that were requested and are not ready yet."""
    pools = dict(seen.pools)
    for role, size in wanted.items():
        ready = seen.pool(role).ready
        pools[role] = PoolState(min(ready, size), max(0, size - ready), max(0, ready - size))
    return replace(seen, pools=pools)


def _sum(samples: Samples, name: str) -> float:
    return sum(value for _, value in samples[name] if math.isfinite(value))


def _mean(samples: Samples, name: str) -> float:
    values = [value for _, value in samples[name] if math.isfinite(value)]
    return sum(values) / len(values) if values else 0.0


def _above(samples: Samples, name: str, limit: float) -> float:
    """Values of a histogram above the smallest bucket bound that is at least `limit`."""
    if math.isinf(limit):
        return 0.0
    below: dict[float, float] = defaultdict(float)
    for labels, value in samples[f"{name}_bucket"]:
        below[float(labels.get("le", "inf"))] += value
    bound = min((edge for edge in below if edge >= limit), default=math.inf)
    return max(0.0, _sum(samples, f"{name}_count") - below.get(bound, 0.0)) if below else 0.0
