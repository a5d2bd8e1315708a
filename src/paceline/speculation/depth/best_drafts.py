"""Whether to draft, and what: the best drafts under what is believed of costs and acceptance, if they beat plain decoding by a
margin, and to begin with by as much more as makes up for beginning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.speculation.depth.acceptance import Acceptance
from paceline.speculation.depth.allocation import Allocation, Value
from paceline.speculation.depth.entry import Entry
from paceline.speculation.depth.lag import Lag, horizon
from paceline.speculation.depth.policy import Candidate, method_of
from paceline.speculation.depth.rounds import Rounds
from paceline.speculation.depth.step_time import Costs, StepTime


class BestDrafts:
    """Goes by estimates that others learn, and by whether the last ones it found were worth it."""

    def __init__(self, acceptance: Acceptance, times: StepTime, entry: Entry, lag: Lag, margin: float) -> None:
        self._acceptance, self._times, self._entry, self._lag = acceptance, times, entry, lag
        self._margin = margin
        self.is_drafting = False
        self.advantage: float | None = None
        """Expected speed of the best drafts over plain decoding; None while costs are unknown."""

    @property
    def least(self) -> float:
        """The advantage that keeps drafting going."""
        return 1.0 + self._margin / 3.0

    def find(self, batch: Sequence[Candidate], rounds: Rounds) -> list[int] | None:
        """Depths, by candidate; None if nobody is to draft."""
        context, room = sum([candidate.num_tokens for candidate in batch]), rounds.seats(len(batch))
        plain, costs = self._times.plain(room, context), self._times.costs(room, context)
        best, self.advantage = None, None
        if batch and plain is not None and costs is not None:
            best = self._worth_it(batch, rounds, self._values(batch, costs), costs, plain)
        self.is_drafting = best is not None
        return None if best is None else best.depths

    def _values(self, batch: Sequence[Candidate], costs: Costs) -> dict[str, Value]:
        return {
            category: Value(self._acceptance.survival(category), self._acceptance.delivery(category))
            for category in dict.fromkeys([candidate.category for candidate in batch])
            if method_of(category) in costs.lines
        }

    def _worth_it(
        self, batch: Sequence[Candidate], rounds: Rounds, values: Mapping[str, Value], costs: Costs, plain: float
    ) -> Allocation | None:
        best, late = rounds.allocate(batch, values, costs), set[int]()
        if best is None:
            return None
        advantage, least = best.rate * plain / len(batch), self._least(batch, plain)
        if advantage > least:
            saved = (1.0 - least / advantage) * plain / len(batch)  # by each, of a plain step
            late = self._lag.late(batch, best.depths, saved)
        if late:
            punctual = [c._replace(max_depth=0) if i in late else c for i, c in enumerate(batch)]
            best = rounds.allocate(punctual, values, costs)
            if best is not None and 2 * sum(best.depths) < max(best.depths) * len(batch):
                best = None  # HAZARD: rounds that run ahead are as large for all: for few they are left to the host
            advantage = best.rate * plain / len(batch) if best else 1.0
        self.advantage = advantage
        if best is None or advantage <= least:
            return None
        return self._with_late(batch, late, values, best) if rounds.is_even else best

    def _least(self, batch: Sequence[Candidate], plain: float) -> float:
        """The advantage that drafts must have."""
        if self.is_drafting:
            return self.least
        steps = sum([horizon(candidate) for candidate in batch]) / len(batch)
        return 1.0 + self._margin + self._entry.seconds(len(batch)) / (steps * plain)

    def _with_late(
        self, batch: Sequence[Candidate], late: set[int], values: Mapping[str, Value], best: Allocation
    ) -> Allocation:
        """Who is late drafts as well where rounds have room for it anyway, if what its drafts must read first takes less than
        what all wait for the tokens that it gains."""
        depths, deepest = list(best.depths), max(best.depths)
        for i in late:
            depth, value = min(batch[i].max_depth, deepest), values[batch[i].category]
            gained = value.delivery * sum(value.survival[:depth])
            rounds = horizon(batch[i]) / (1.0 + gained)
            if self._lag.reading(batch[i]) < rounds * gained / best.rate:
                depths[i] = depth
        return replace(best, depths=depths)
