"""The result of a bench run, as values and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.summary import Summary
from paceline.bench.trace import AnswerTimes
from paceline.cluster.cost.cost import dollars_per_million


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
