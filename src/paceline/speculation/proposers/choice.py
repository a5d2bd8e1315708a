"""Which method drafts for which sequence, from what was observed. Pure: time comes in as seconds, nothing is random.

Two kinds of method. A *lookup* answers from memory at once, so its guess is in hand before the choice and, used or not, is
later held against the text that came. A *model* costs time that the whole batch shares, and shows what it is worth only
when it is used. For the set M of models used in a step

    rate(M) = sum_s (1 + max over lookups and M of E[accepted]) / (t_pass + sum_{m in M} t_m)

and the set is grown while the rate rises. E is the mean accepted by method and size of the guess, times how much better or
worse than that mean the method has done on this very sequence.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.speculation.depth.acceptance import PRIOR_ALPHA, PRIOR_ROUNDS, expected_tokens

WINDOW = 256.0
"""Rounds that the mean of a method remembers."""
SEQUENCE_WINDOW = 32.0
"""Tokens that the record of a method on one sequence remembers, and what it takes to outweigh its prior."""
SEQUENCE_PRIOR = 4.0
EXPLORE_EVERY = 32
"""At most one step in so many runs a model only to see what it is worth, and at most one round of a sequence in so many
goes by a method that does not look best for it."""
EXPLORERS = 4
"""Sequences that try such a model."""
NUM_TIMES = 9


@dataclass(slots=True)
class _Mean:
    """Tokens accepted a round, from a prior that real rounds soon outweigh."""

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
    """The step of its last exploration, or its first step."""
    skills: dict[str, _Skill] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    """The last step of each method."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that wants a draft: tokens it asks for, and the size of the guess each lookup has in hand."""

    sequence_id: int
    depth: int
    in_hand: Mapping[str, int]


class MethodChoice:
    """Learns by `observe`, `took` and `passed`; `choose` names a method for every candidate, "" where there is none."""

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
        """A guess of `size` tokens had `accepted` of those that came; `open_ended`: all that came, so it may have had more."""
        mean, skill = self._mean(method, size), self._skill(sequence_id, method)
        expected = mean.value
        tokens = max(float(accepted), expected * skill.value) if open_ended else float(accepted)
        mean.add(tokens)
        skill.add(tokens, expected)

    def took(self, model: str, seconds: float) -> None:
        """What drafting by `model` cost a step."""
        self._times[model].append(seconds)

    def passed(self, seconds: float) -> None:
        """What the rest of a step took."""
        self._passes.append(seconds)

    def forget(self, sequence_id: int) -> None:
        self._records.pop(sequence_id, None)

    def expected(self, sequence_id: int, method: str, size: int) -> float:
        """Tokens that a guess of `size` is expected to have accepted."""
        return self._mean(method, size).value * self._skill(sequence_id, method).value

    def choose(self, batch: Sequence[Candidate]) -> list[str]:
        if not batch:
            return []
        best = [self._best_in_hand(candidate) for candidate in batch]
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

    def in_hand(self, candidate: Candidate) -> str:
        """The best lookup alone."""
        return self._best_in_hand(candidate)[1]

    def _best_in_hand(self, candidate: Candidate) -> tuple[float, str]:
        offers = [(self.expected(candidate.sequence_id, m, size), m) for m, size in candidate.in_hand.items() if size]
        return max(offers, default=(0.0, ""))

    def _explore(self, batch: Sequence[Candidate], chosen: list[str]) -> list[str]:
        """The chosen methods, but for a few sequences now and then that try another.

        A model that nobody uses costs the whole batch its time, so steps are counted for it; one that runs anyhow costs a
        sequence that tries it only its own round.
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
        """Steps unused, the more the longer it takes: it costs at most one part in `EXPLORE_EVERY` of the time as well."""
        seconds = self._pass_seconds()
        return EXPLORE_EVERY * (1.0 + (self._model_seconds(model) / seconds if seconds > 0.0 else 0.0))

    def _pass_seconds(self) -> float:
        return median(self._passes) if self._passes else 0.0

    def _model_seconds(self, model: str) -> float:
        """The least of late: now and then a model has a prompt to catch up with. Free until a pass was measured too."""
        return min(self._times[model], default=0.0) if self._passes else 0.0

    def _mean(self, method: str, size: int) -> _Mean:
        key = method, size.bit_length()  # 1, 2-3, 4-7, 8-15, …: how much a method offers says how sure it is
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
