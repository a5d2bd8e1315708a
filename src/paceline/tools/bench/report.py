"""The result of a bench run, as values and as JSON.

A `Summary` has the figures of a set of traces.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.policy.cost.cost import dollars_per_million
from paceline.policy.depth.acceptance import known_positions
from paceline.tools.prompts import AnswerTimes, Arrival

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


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of an answer from the reference."""

    answer: int
    category: str
    character: int
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender's figures, and its differences from the first contender's text."""

    name: str
    overall: Summary
    by_category: Mapping[str, Summary]
    """Figures by category. Seconds are summed over requests, so tokens per second are those of one request."""
    identical: int
    differences: tuple[Difference, ...]

    @property
    def compared(self) -> int:
        return self.identical + len(self.differences)


@dataclass(frozen=True, slots=True)
class Report:
    """`about` holds the settings. The first contender is the reference for speed and text."""

    about: Mapping[str, Any]
    contenders: tuple[Measured, ...]
    price: float | None = None
    """Dollars per hour of the devices of one contender. None if the price is not known."""

    def dollars_per_million(self, contender: Measured) -> float | None:
        """Dollars per million tokens. None without a price or tokens."""
        speed = contender.overall.tokens_per_second
        return None if self.price is None or not speed else dollars_per_million(self.price, speed)

    @property
    def categories(self) -> list[str]:
        return list(self.contenders[0].by_category)

    def to_json(self) -> dict[str, Any]:
        contenders = [
            _measured(contender)
            | ({} if self.price is None else {"dollars_per_million_tokens": self.dollars_per_million(contender)})
            for contender in self.contenders
        ]
        about = dict(self.about) | ({} if self.price is None else {"price_per_hour": self.price})
        return {"about": about, "contenders": contenders}


def measure(name: str, traces: Sequence[AnswerTimes], seconds: float, reference: Sequence[AnswerTimes]) -> Measured:
    by_category: dict[str, list[AnswerTimes]] = {}
    for trace in traces:
        by_category.setdefault(trace.category, []).append(trace)
    differences = [
        _difference(i, expected, found)
        for i, (expected, found) in enumerate(zip(reference, traces, strict=True))
        if not _same(expected, found)
    ]
    return Measured(
        name=name,
        overall=Summary.of(traces, seconds),
        by_category={category: Summary.of(some) for category, some in sorted(by_category.items())},
        identical=len(traces) - len(differences),
        differences=tuple(differences),
    )


def _same(expected: AnswerTimes, found: AnswerTimes) -> bool:
    if expected.token_ids is not None and found.token_ids is not None:
        return expected.token_ids == found.token_ids
    return expected.text == found.text


def _difference(answer: int, expected: AnswerTimes, found: AnswerTimes) -> Difference:
    wanted, got = expected.text, found.text
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    return Difference(answer, expected.category, at, wanted[at : at + 40], got[at : at + 40])


def _measured(measured: Measured) -> dict[str, Any]:
    return {
        "name": measured.name,
        **_summary(measured.overall),
        "identical": measured.identical,
        "compared": measured.compared,
        "differences": [
            {
                "answer": d.answer,
                "category": d.category,
                "character": d.character,
                "expected": d.expected,
                "found": d.found,
            }
            for d in measured.differences
        ],
        "by_category": {category: _summary(summary) for category, summary in measured.by_category.items()},
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "requests": summary.requests,
        "tokens": summary.tokens,
        "seconds": summary.seconds,
        "tokens_per_second": summary.tokens_per_second,
        "ttft_seconds": {"p50": summary.ttft_p50, "p99": summary.ttft_p99},
        "token_seconds": {"p50": summary.token_p50, "p99": summary.token_p99},
        "tokens_per_round": summary.tokens_per_round,
        "drafted": summary.drafted,
        "accepted": summary.accepted,
        "draft_acceptance_rate": summary.draft_acceptance_rate,
        "alpha": summary.alpha,
        "alpha_by_position": [alpha.value for alpha in summary.alphas],
        "trials_by_position": [alpha.trials for alpha in summary.alphas],
    }
