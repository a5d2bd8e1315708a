"""The choice of a method for each sequence of `combined`. Pure: times are arguments, nothing is random.

There are two kinds of methods. A *lookup* drafts from memory at once: its draft is ready before the choice and is compared
with the text whether it was used or not. A *model* takes time that the whole batch shares, and is observed only when used.
For the set M of models used in a step

    rate(M) = sum_s (1 + max over lookups and M of E[accepted]) / (t_pass + sum_{m in M} t_m)

and the set grows while the rate rises. E is the mean accepted by method and draft size, times the ratio of accepted to
expected tokens of the method on this sequence.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.policy.cost.speculation import expected_tokens
from paceline.policy.depth.acceptance import PRIOR_ALPHA, PRIOR_ROUNDS

WINDOW = 256.0
"""Rounds in the mean of a method."""
SEQUENCE_WINDOW = 32.0
"""Tokens in the ratio of a method on one sequence."""
SEQUENCE_PRIOR = 4.0
"""Weight, in tokens, of the prior ratio 1."""
EXPLORE_EVERY = 32
"""Steps of which at most one runs an otherwise unused model to measure it, and rounds of a sequence of which at most one uses
a method that is not the best for it."""
EXPLORERS = 4
"""Sequences that explore an unused model in one step."""
NUM_TIMES = 9
"""Times remembered of each model and of passes."""


@dataclass(slots=True)
class _Mean:
    """Accepted tokens per round, with a prior."""

    tokens: float
    rounds: float = PRIOR_ROUNDS

    def add(self, tokens: float) -> None:
        keep = min(1.0, WINDOW / (self.rounds + 1.0))
        self.tokens = self.tokens * keep + tokens
        self.rounds = self.rounds * keep + 1.0

    @property
    def value(self) -> float:
        return self.tokens / self.rounds


@dataclass(slots=True)
class _Skill:
    """Accepted over expected of one method on one sequence."""

    accepted: float = SEQUENCE_PRIOR
    expected: float = SEQUENCE_PRIOR

    def add(self, accepted: float, expected: float) -> None:
        keep = min(1.0, SEQUENCE_WINDOW / (self.expected + expected))
        self.accepted = self.accepted * keep + accepted
        self.expected = self.expected * keep + expected

    @property
    def value(self) -> float:
        return self.accepted / self.expected


@dataclass(slots=True)
class _Record:
    explored: int
    """Step of the last exploration, or the first step."""
    skills: dict[str, _Skill] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    """Last step of each method."""


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A sequence to draft for: its depth, and the size of each lookup's draft."""

    sequence_id: int
    depth: int
    lookups: Mapping[str, int]


class MethodChoice:
    """Learns by the `observe` methods; `choose` returns a method for every candidate, "" if there is none."""

    def __init__(self, models: Sequence[str]) -> None:
        self._models = tuple(models)
        self._means: dict[tuple[str, int], _Mean] = {}
        self._records: dict[int, _Record] = {}
        self._passes: deque[float] = deque(maxlen=NUM_TIMES)
        self._times: dict[str, deque[float]] = {model: deque(maxlen=NUM_TIMES) for model in models}
        self._step = 0
        self._explored = 0
        self._used = dict.fromkeys(models, 0)

    def observe(self, sequence_id: int, method: str, size: int, accepted: int, open_ended: bool = False) -> None:
        """Count a draft of `size` tokens of which `accepted` match the text. `open_ended` is true if they match all of the new
        text, so that more might have matched."""
        mean, skill = self._mean(method, size), self._skill(sequence_id, method)
        expected = mean.value
        tokens = max(float(accepted), expected * skill.value) if open_ended else float(accepted)
        mean.add(tokens)
        skill.add(tokens, expected)

    def observe_draft_time(self, model: str, seconds: float) -> None:
        """Time that drafting by `model` added to a step."""
        self._times[model].append(seconds)

    def observe_pass_time(self, seconds: float) -> None:
        """Time of a step without drafting."""
        self._passes.append(seconds)

    def forget(self, sequence_id: int) -> None:
        self._records.pop(sequence_id, None)

    def expected(self, sequence_id: int, method: str, size: int) -> float:
        """Expected accepted tokens of a draft of `size` tokens."""
        return self._mean(method, size).value * self._skill(sequence_id, method).value

    def choose(self, batch: Sequence[DraftCandidate]) -> list[str]:
        if not batch:
            return []
        best = [self._best_lookup(candidate) for candidate in batch]
        offers = {
            model: [(self.expected(c.sequence_id, model, c.depth), model) for c in batch] for model in self._models
        }
        seconds = self._pass_seconds()
        rate = _rate(best, seconds)
        while offers:
            rates = {
                model: _rate(
                    [max(pair) for pair in zip(best, offer, strict=True)], seconds + self._model_seconds(model)
                )
                for model, offer in offers.items()
            }
            model = max(rates, key=lambda name: rates[name])
            if rates[model] <= rate:
                break
            rate, seconds = rates[model], seconds + self._model_seconds(model)
            best = [max(pair) for pair in zip(best, offers.pop(model), strict=True)]
        return self._explore(batch, [method for _, method in best])

    def best_lookup(self, candidate: DraftCandidate) -> str:
        """The best lookup, "" if no lookup has a draft."""
        return self._best_lookup(candidate)[1]

    def _best_lookup(self, candidate: DraftCandidate) -> tuple[float, str]:
        offers = [(self.expected(candidate.sequence_id, m, size), m) for m, size in candidate.lookups.items() if size]
        return max(offers, default=(0.0, ""))

    def _explore(self, batch: Sequence[DraftCandidate], chosen: list[str]) -> list[str]:
        """The chosen methods, except for a few sequences that explore another.

        An unused model costs the whole batch its time, so steps are counted for it. A model that runs anyway costs only the
        round of the sequence that explores it.
        """
        self._step += 1
        records = [self._record(candidate.sequence_id) for candidate in batch]
        running = [model for model in self._models if model in chosen]
        for i, record in enumerate(records):
            model = min(running, key=lambda name: record.used.get(name, 0), default="")
            if model and min(self._step - record.used.get(model, 0), self._step - record.explored) >= EXPLORE_EVERY:
                chosen[i], record.explored = model, self._step
        idle = {m: (self._step - self._used[m]) / self._explore_after(m) for m in self._models if m not in running}
        model = max(idle, key=lambda name: idle[name], default="")
        if model and idle[model] >= 1.0 and self._step - self._explored >= EXPLORE_EVERY:
            self._explored = self._step
            for i in sorted(range(len(batch)), key=lambda i: records[i].used.get(model, 0))[:EXPLORERS]:
                chosen[i] = model
        for method, record in zip(chosen, records, strict=True):
            record.used[method] = self._step
            if method in self._used:
                self._used[method] = self._step
        return chosen

    def _explore_after(self, model: str) -> float:
        """Unused steps before a model is explored. They grow with its time: exploring costs at most 1 / `EXPLORE_EVERY`."""
        seconds = self._pass_seconds()
        return EXPLORE_EVERY * (1.0 + (self._model_seconds(model) / seconds if seconds > 0.0 else 0.0))

    def _pass_seconds(self) -> float:
        return median(self._passes) if self._passes else 0.0

    def _model_seconds(self, model: str) -> float:
        """The smallest recent time, since some drafts include a draft prefill. 0 until a pass was measured too."""
        return min(self._times[model], default=0.0) if self._passes else 0.0

    def _mean(self, method: str, size: int) -> _Mean:
        key = method, size.bit_length()  # 1, 2-3, 4-7, 8-15, …: a larger draft is a more confident one
        mean = self._means.get(key)
        if mean is None:
            prior = expected_tokens([PRIOR_ALPHA] * size, size) - 1.0
            mean = self._means[key] = _Mean(prior * PRIOR_ROUNDS)
        return mean

    def _skill(self, sequence_id: int, method: str) -> _Skill:
        return self._record(sequence_id).skills.setdefault(method, _Skill())

    def _record(self, sequence_id: int) -> _Record:
        return self._records.setdefault(sequence_id, _Record(self._step))


def _rate(best: Sequence[tuple[float, str]], seconds: float) -> float:
    tokens = sum(1.0 + value for value, _ in best)
    return tokens / seconds if seconds > 0.0 else tokens
