"""The default depth policy: as many drafts as make tokens come fastest, and none where plain decoding is faster.

Each step it takes the best drafts under the measured costs (`StepTime`) and alphas (`Acceptance`) if they beat B / t_plain(B)
by a margin (`BestDrafts`), and to begin with by as much more as makes up for beginning (`Entry`, `Lag`).
What it does not do it cannot see, in both directions: at depth 0 it probes (`Probing`), and while it drafts it decodes a
step plainly now and then (`Baselines`), so that what it must never fall below is a fresh measurement: before the first
drafts for a batch of that scale, soon after, later one in 200. One by which drafting loses is repeated until they do not
or drafting ends. Nor does one depth tell what another costs: where a method has drafted the same for long, a step in 16 drafts
one more.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nsmallest

from paceline.core.errors import InvalidConfig
from paceline.speculation.depth.acceptance import Acceptance
from paceline.speculation.depth.baseline import Baselines
from paceline.speculation.depth.best_drafts import BestDrafts
from paceline.speculation.depth.entry import Entry
from paceline.speculation.depth.even_rounds import EvenRounds
from paceline.speculation.depth.lag import Lag
from paceline.speculation.depth.policy import Candidate, StepObservation, method_of
from paceline.speculation.depth.probing import SEQUENCES, Probing
from paceline.speculation.depth.rounds import RaggedRounds, Rounds
from paceline.speculation.depth.step_time import StepTime

REST = 8
"""Steps for which a decision against drafting stands, if nothing is drafted meanwhile and the batch stays about as large: plain
steps teach little, and to work it out takes longer than it may where a step takes a few milliseconds."""
_ABOUT = 8
"""By one in so many a batch may grow or shrink and rest on."""
_AGEING = 32
"""Rounds by which a step ages what is known of a category's acceptance, at the most: one of many sequences would leave nothing
of those before it, and the best of many depths would be the one that its luck speaks for."""
VARY_EVERY = 16
"""Steps of drafting of which one may differ by a draft, to tell c1 from c0."""


class GoodputDepth:
    """`DepthPolicy`. Drafting starts when it promises `margin` over plain, besides what starting costs, and stops when it
    promises under a third of that."""

    def __init__(
        self, max_depth: int = 8, margin: float = 0.03, probe_share: float = 0.01, padded: EvenRounds | None = None
    ) -> None:
        if max_depth < 1 or margin < 0.0 or not 0.0 <= probe_share <= 0.01:
            raise InvalidConfig(
                "goodput needs max_depth >= 1, margin >= 0 and probe_share in [0, 0.01]; "
                f"got {max_depth}, {margin}, {probe_share}"
            )
        self._max_depth = max_depth
        self._acceptance = Acceptance(max_depth)
        self._times = StepTime()
        self._entry = Entry()
        self._lag = Lag()
        self._probing = Probing(probe_share)
        self._drafts = BestDrafts(self._acceptance, self._times, self._entry, self._lag, margin)
        self._resting, self._rested = 0, 0  # steps still to rest, and the batch that rests
        self._baselines = Baselines()
        self._ragged = RaggedRounds()
        self._even = padded
        self._probed: dict[str, float] = {}
        """Categories probed since they last drafted because it pays, and the acceptance expected of the first draft."""

    @property
    def advantage(self) -> float | None:
        """Expected speed of the best drafts over plain decoding at the last decision; None while costs are unknown."""
        return self._drafts.advantage

    def calibrate(self, passes: Mapping[int, float], per_token: float = 0.0) -> None:
        """Take on {target rows: seconds} from a warm-up, and what a token of context adds to a pass. Without one the costs are
        learned on the way."""
        self._times.calibrate(passes, per_token)

    def alphas(self, category: str) -> tuple[float, ...]:
        """Conditional acceptance by position, as now believed."""
        return self._acceptance.alphas(category)

    def observe(self, step: StepObservation) -> None:
        self._entry.observe(step, self._times.usual(step))
        self._lag.observe(step)
        if not step.drafting:
            is_timed = step.is_timed and not step.prefill_rows
            self._baselines.saw(step.batch, is_timed, self._is_loss_by(step))
        self._times.observe(step)
        if any(seen.drafted or seen.asked for seen in step.rounds):
            self._resting = 0
        counts = Counter([seen.category for seen in step.rounds])
        for seen in step.rounds:
            age = min(1.0, _AGEING / counts[seen.category])
            self._acceptance.observe(
                seen.category, seen.drafted, seen.accepted, seen.asked, seen.num_nodes, seen.path, age
            )
        for category, expected in self._probed.items():
            rounds = [seen for seen in step.rounds if seen.category == category and (seen.drafted or seen.asked)]
            if rounds:
                kept = sum(seen.has_first for seen in rounds)
                loss = self._longer(step) - kept / step.batch
                self._probing.result(category, len(rounds), kept, expected, loss, step.is_timed)

    def restart(self, category: str, alpha: float) -> None:
        self._resting = 0
        self._acceptance.restart(category, alpha)
        self._probing.restart(category)
        self._probed.pop(category, None)

    def rests(self, batch: int) -> bool:
        if self._resting == 0 or _ABOUT * abs(batch - self._rested) > self._rested or self._probing.stands:
            return False
        self._resting -= 1
        self._probing.tick(())
        return True

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        depths = self._best(batch)
        if self._baselines.replaces(len(batch), any(depths)):
            return [0] * len(batch)
        drafting = {candidate.category for candidate, depth in zip(batch, depths, strict=True) if depth}
        for category in drafting:
            self._probed.pop(category, None)
        if self._baselines.drafted(len(batch)) % VARY_EVERY == VARY_EVERY - 1:
            self._vary(batch, depths)
        self._probing.tick(drafting)
        self._probe(batch, depths, drafting)
        return depths

    def _best(self, batch: Sequence[Candidate]) -> list[int]:
        depths = self._drafts.find(batch, self._rounds_of(batch))
        if depths is None and self.advantage is not None:
            self._resting, self._rested = REST, len(batch)
        return depths or [0] * len(batch)

    def _vary(self, batch: Sequence[Candidate], depths: list[int]) -> None:
        """One more each, or less where none may have more, for methods that only ever drafted to one depth."""
        room = self._rounds_of(batch).seats(len(batch))
        of_late = {method: self._times.knows_slope(method, room) for method in {method_of(c.category) for c in batch}}
        for i, (candidate, depth) in enumerate(zip(batch, depths, strict=True)):
            if depth and not of_late[method_of(candidate.category)]:
                depths[i] = depth + 1 if depth < min(candidate.max_depth, self._max_depth) else max(1, depth - 1)

    def _probe(self, batch: Sequence[Candidate], depths: list[int], drafting: set[str]) -> None:
        """One draft each (two if nothing but one is known) for a few sequences of a category that has gone unseen for long;
        for all of them while its cost is hardly known, since a step that drafts for few may be taken another way."""
        unseen = dict.fromkeys(c.category for c in batch if c.category not in drafting and c.max_depth)
        if not unseen or self._times.plain(len(batch)) is None:
            self._probing.drop()
            return
        asked = {method_of(category) for category in drafting}
        unsettled = [name for name in unseen if not self._times.is_settled(method_of(name))]
        chosen = {
            name: self._probed_for(name, batch, len(batch) if name in unsettled else SEQUENCES) for name in unseen
        }
        losses = {name: self._loss(name, chosen[name], batch, asked) for name in unseen}
        category = self._probing.pick(losses, unsettled)
        if category is None:
            return
        if self._probing.is_first(category):
            self._acceptance.loosen(category)
        self._probed[category] = self._acceptance.survival(category)[0]
        for i in chosen[category]:
            depths[i] = min(self._probe_depth(method_of(category), batch), batch[i].max_depth)

    def _probed_for(self, category: str, batch: Sequence[Candidate], most: int) -> list[int]:
        """Those with the least to read."""
        chosen = [i for i, c in enumerate(batch) if c.category == category and c.max_depth]
        return nsmallest(most, chosen, key=lambda i: self._lag.reading(batch[i]))

    def _probe_depth(self, method: str, batch: Sequence[Candidate]) -> int:
        room = self._rounds_of(batch).seats(len(batch))
        return 2 if self._times.is_settled(method) and not self._times.knows_slope(method, room) else 1

    def _is_loss_by(self, step: StepObservation) -> bool:
        """Whether drafting as decided last loses against this plain step, whatever is believed of such."""
        plain = self._times.plain(step.room, step.context)
        if not self._drafts.is_drafting or plain is None or self.advantage is None:
            return False
        return self.advantage * step.seconds / plain < self._drafts.least

    def _longer(self, step: StepObservation) -> float:
        """By what share of a plain one it took longer for its probes; 0 where that is not known. Where others draft as well,
        it is as long as such steps are."""
        plain = self._times.plain(step.room, step.context)
        is_alone = all(seen.category in self._probed for seen in step.rounds if seen.asked)
        without = plain if is_alone else self._times.usual(step)
        if plain is None or without is None or step.prefill_rows:
            return 0.0
        return (step.seconds - without) / plain

    def _loss(self, category: str, chosen: Sequence[int], batch: Sequence[Candidate], asked: set[str]) -> float:
        """What a probe costs, as a share of a plain step, where the methods `asked` draft anyway: by how much it makes a step
        longer, as far as is known, less the tokens that it gains."""
        method, rounds = method_of(category), self._rounds_of(batch)
        room, context = rounds.seats(len(batch)), sum([candidate.num_tokens for candidate in batch])
        costs, plain = self._times.costs(room, context), self._times.plain(room, context)
        if plain is None:
            return 0.0
        seconds = sum(self._lag.reading(batch[i]) for i in chosen)
        if seconds:
            seconds += self._entry.seconds(len(batch))
        if costs is not None and method in costs.lines and method not in asked:
            depth = self._probe_depth(method, batch)
            seconds += costs.lines[method].seconds(depth)
            if not asked:
                rows = rounds.rows(len(batch), len(chosen), depth)
                seconds += costs.network + costs.verify(rows) - plain
        kept = self._acceptance.survival(category)[0] * self._acceptance.delivery(category) * len(chosen)
        return seconds / plain - kept / len(batch)

    def _rounds_of(self, batch: Sequence[Candidate]) -> Rounds:
        return self._even if self._even is not None and self._even.holds(batch) else self._ragged
