"""Figures of a set of traces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.bench.trace import AnswerTimes, Arrival
from paceline.speculation.depth.acceptance import known_positions

MIN_TRIALS = 5
"""Trials below which an alpha is unreliable."""


@dataclass(frozen=True, slots=True)
class Alpha:
    """Conditional acceptance at one position, given that all positions before it were accepted."""

    accepted: int
    trials: int

    @property
    def value(self) -> float:
        return self.accepted / self.trials


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of some traces, in seconds. A figure without data is None."""

    requests: int
    tokens: int
    seconds: float
    ttft_p50: float | None
    ttft_p99: float | None
    token_p50: float | None
    token_p99: float | None
    tokens_per_round: float | None
    """Tokens committed per pass of the target, without the prefill."""
    drafted: int
    accepted: int
    alphas: tuple[Alpha, ...]
    """Entry 0 is the first draft of a round."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def alpha(self) -> float | None:
        """All positions together."""
        trials = sum(alpha.trials for alpha in self.alphas)
        return sum(alpha.accepted for alpha in self.alphas) / trials if trials else None

    @classmethod
    def of(cls, traces: Sequence[AnswerTimes], seconds: float | None = None) -> "Summary":
        """`seconds` is the wall time of all traces. If it is None, the sum of their times counts."""
        arrivals = [arrival for trace in traces for arrival in trace.arrivals]
        first = [trace.ttft for trace in traces if trace.ttft is not None]
        waits = [wait for trace in traces for wait in trace.token_seconds]
        rounds = sum(trace.num_rounds for trace in traces)
        return cls(
            requests=len(traces),
            tokens=sum(trace.tokens for trace in traces),
            seconds=sum(trace.seconds for trace in traces) if seconds is None else seconds,
            ttft_p50=percentile(first, 50),
            ttft_p99=percentile(first, 99),
            token_p50=percentile(waits, 50),
            token_p99=percentile(waits, 99),
            tokens_per_round=sum(trace.round_tokens for trace in traces) / rounds if rounds else None,
            drafted=sum(arrival.drafted for arrival in arrivals),
            accepted=sum(arrival.accepted for arrival in arrivals),
            alphas=alphas_by_position(arrivals),
        )


def alphas_by_position(arrivals: Iterable[Arrival]) -> tuple[Alpha, ...]:
    """A round that accepted n of K drafts is a success for positions 1..n and a failure for n + 1.

    NOTE: a draft's tokens are its positions, which holds for chains only.
    """
    accepted: list[int] = []
    trials: list[int] = []
    for arrival in arrivals:
        known = known_positions(arrival.drafted, arrival.accepted)
        missing = [0] * (known - len(trials))
        accepted += missing
        trials += missing
        for i in range(known):
            trials[i] += 1
            accepted[i] += i < arrival.accepted
    return tuple(Alpha(hits, count) for hits, count in zip(accepted, trials, strict=True))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the nearest ranks, as numpy's default."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
