"""The default depth policy: as many drafts as make tokens come fastest, and none where plain decoding is faster.

Each step it asks `allocate` for the best drafts under the measured costs (`StepTime`) and alphas (`Acceptance`) and
takes them if they beat B / t_plain(B) by a margin. What it does not do it cannot see, in both directions: at depth 0
it probes (`Probing`), and while it drafts it decodes one step in 200 plainly, so that the baseline it must never fall
below is a fresh measurement.
"""

from collections.abc import Mapping, Sequence

from paceline.core.errors import InvalidConfig
from paceline.speculation.acceptance import Acceptance
from paceline.speculation.depth.allocation import Value, allocate
from paceline.speculation.depth.policy import Candidate, StepObservation
from paceline.speculation.depth.probing import SEQUENCES, Probing
from paceline.speculation.depth.step_time import StepTime

BASELINE_EVERY = 200
"""Steps of drafting after which one is plain."""


class GoodputDepth:
    """`DepthPolicy`. Drafting starts when it promises `margin` over plain and stops when it promises under a third of
    that."""

    def __init__(self, max_depth: int = 8, margin: float = 0.03, probe_share: float = 0.01) -> None:
        if max_depth < 1 or margin < 0.0 or not 0.0 <= probe_share <= 0.01:
            raise InvalidConfig(
                "goodput needs max_depth >= 1, margin >= 0 and probe_share in [0, 0.01]; "
                f"got {max_depth}, {margin}, {probe_share}"
            )
        self._margin = margin
        self._acceptance = Acceptance(max_depth)
        self._times = StepTime()
        self._probing = Probing(probe_share)
        self._drafting = False
        self._since_plain = 0
        self._probed: tuple[str, float] | None = None
        self.advantage: float | None = None
        """Expected speed of the best drafts over plain decoding at the last decision; None while costs are unknown."""

    def calibrate(self, passes: Mapping[int, float]) -> None:
        """Take on {target rows: seconds} from a warm-up. Without one the costs are learned on the way."""
        self._times.calibrate(passes)

    def alphas(self, category: str) -> tuple[float, ...]:
        """Conditional acceptance by position, as now believed."""
        return self._acceptance.alphas(category)

    def observe(self, step: StepObservation) -> None:
        self._times.observe(step)
        for seen in step.rounds:
            self._acceptance.observe(seen.category, seen.drafted, seen.accepted, seen.asked)
        if self._probed is not None:
            category, expected = self._probed
            rounds = [seen for seen in step.rounds if seen.category == category and (seen.drafted or seen.asked)]
            # Nothing came of it: that is one failed round, or the probe would be repeated for ever.
            self._probing.result(category, max(1, len(rounds)), sum(seen.accepted > 0 for seen in rounds), expected)
            self._probed = None

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        depths = self._best(batch)
        self._since_plain = self._since_plain + 1 if any(depths) else 0
        if self._since_plain > BASELINE_EVERY:
            self._since_plain = 0
            return [0] * len(batch)
        drafting = {candidate.category for candidate, depth in zip(batch, depths, strict=True) if depth}
        self._probing.tick(drafting)
        self._probe(batch, depths, drafting)
        return depths

    def _best(self, batch: Sequence[Candidate]) -> list[int]:
        nothing = [0] * len(batch)
        plain = self._times.plain(len(batch))
        costs = self._times.costs(len(batch))
        if not batch or plain is None or costs is None:
            self.advantage, self._drafting = None, False
            return nothing
        values = {
            category: Value(self._acceptance.survival(category), self._acceptance.delivery(category))
            for category in dict.fromkeys([candidate.category for candidate in batch])
        }
        best = allocate(batch, values, costs)
        if best is None:
            self.advantage, self._drafting = None, False
            return nothing
        self.advantage = best.rate * plain / len(batch)
        self._drafting = self.advantage > 1.0 + (self._margin / 3.0 if self._drafting else self._margin)
        return best.depths if self._drafting else nothing

    def _probe(self, batch: Sequence[Candidate], depths: list[int], drafting: set[str]) -> None:
        """One draft each for a few sequences of a category that has gone unseen for long."""
        unseen = {c.category for c in batch if c.category not in drafting and c.max_depth}
        plain = self._times.plain(len(batch))
        if not unseen or plain is None:
            return
        costs = self._times.costs(len(batch))
        lengthening = 0.0
        if costs is not None and not drafting:
            rows = min(2 * len(batch), len(batch) + SEQUENCES)
            lengthening = (costs.verify(rows) + costs.base + costs.per_depth) / plain - 1.0
        category = self._probing.pick(unseen, lengthening, now=costs is None)
        if category is None:
            return
        if self._probing.is_first(category):
            self._acceptance.loosen(category)
        self._probed = category, self._acceptance.alphas(category)[0]
        chosen = [i for i, c in enumerate(batch) if c.category == category and c.max_depth][:SEQUENCES]
        for i in chosen:
            depths[i] = 1
