"""The default depth policy: the drafts with the most expected tokens per second, and none where plain decoding is faster.

In each step it takes the best drafts by measured costs (`StepTime`) and alphas (`Acceptance`) if they beat the plain rate
B / t_plain(B) by a margin (`BestDrafts`). Prompts that arrive all the time add to the time of drafting and of plain steps
(`PromptLoad`). At a switch to drafting the drafts must also recover its cost (`SwitchOnCost`, `DraftPrefillCost`).

It measures what it does not do. At depth 0 it probes (`Probing`). While it drafts, some steps are plain (`Baselines`): one
before the first drafts of a batch of that scale, one soon after, later one in 200. A baseline by which drafting loses is
repeated until drafting wins or ends; while drafting is clearly faster, baselines are rare from the third on. One depth does not
show the cost of another: a method that has long drafted to one depth drafts one more or one less in every 16th step.

`Baselines` decides which steps are plain only to be timed: while a batch drafts, only they measure what decoding without drafts
takes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from paceline.core.errors import InvalidConfig
from paceline.core.traffic import TrafficClass
from paceline.policy.cost.curve import LinearCost
from paceline.policy.depth.acceptance import Acceptance
from paceline.policy.depth.allocation import BatchShape, PaddedBatch, RaggedBatch
from paceline.policy.depth.best_drafts import BestDrafts
from paceline.policy.depth.observation import DepthCandidate, StepObservation
from paceline.policy.depth.probing import SEQUENCES, Probing
from paceline.policy.depth.prompt_load import PromptLoad
from paceline.policy.depth.start_cost import DraftPrefillCost, SwitchOnCost
from paceline.policy.depth.step_cost import StepTime

FIRST, EVERY = 4, 200
"""Drafting steps between two baselines: at first, and in the long run. The very first step is a baseline too."""
CLEAR_ADVANTAGE = 1.5
"""Advantage of drafting from which a baseline hardly changes a decision, and loses a third of a step or more. After the first
two of a scale the next one then waits as long as in the long run."""
MAX_MISSED = 2
"""Untimed baselines in a row that are repeated at once."""


@dataclass(slots=True)
class _Count:
    num_drafted: int = 0
    interval: int = 0
    num_missed: int = 0


class Baselines:
    """Counts by scale of the batch, a power of two: a time measured for few sequences does not hold for many."""

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}
        self._is_pending = False  # a baseline was requested and not observed yet
        self._last_drafting = 0  # batch of the last step if it drafted; baselines do not count

    def is_due(self, batch: int, would_draft: bool, advantage: float | None = None) -> bool:
        """Whether this step is a baseline instead of drafting. Call it once for every step. `advantage` is the expected speed
        of the drafts over plain decoding, None if it is not known."""
        if not would_draft:
            self._last_drafting = 0
            return False
        if self._is_pending and 2 * self._last_drafting < batch:
            return True  # starting to draft is expensive: no batch starts before the baseline is observed
        if self._count_step(batch, advantage):
            self._is_pending = True
            return True
        self._last_drafting = batch
        return False

    def observe_plain(self, batch: int, is_timed: bool, is_loss: bool) -> None:
        """A plain step, whether it was a baseline or not. The next drafting step becomes a baseline again if this was one
        without a time, or if drafting loses by this measurement."""
        was_pending, self._is_pending = self._is_pending, False
        count = self._count(batch)
        if is_timed:
            count.num_drafted, count.interval, count.num_missed = 0, max(FIRST, count.interval), 0
            is_repeated = is_loss
        else:
            count.num_missed += was_pending
            is_repeated = was_pending and count.num_missed <= MAX_MISSED
        if is_repeated:
            count.num_drafted = EVERY

    def num_drafted(self, batch: int) -> int:
        """Drafting steps since the last plain one."""
        return self._count(batch).num_drafted

    def _count_step(self, batch: int, advantage: float | None) -> bool:
        """Count a drafting step; whether it is to be a baseline."""
        count = self._count(batch)
        count.num_drafted += 1
        is_clear = count.interval > FIRST and advantage is not None and advantage >= CLEAR_ADVANTAGE
        if count.num_drafted <= (EVERY if is_clear else count.interval):
            return False
        count.num_drafted, count.interval = 0, min(max(FIRST, 2 * count.interval), EVERY)
        return True

    def _count(self, batch: int) -> _Count:
        return self._counts.setdefault(batch.bit_length(), _Count())


SKIPPED_STEPS = 8
"""Steps for which a decision against drafting holds while nothing is drafted and the batch stays about as large. A plain step
changes the estimates little, and a decision takes long compared with a step of a few milliseconds."""
_BATCH_CHANGE = 8
"""Inverse share by which a batch may grow or shrink while the decision holds."""
_MAX_AGEING = 32
"""Rounds by which one step ages the evidence of a class, at most. A step of many sequences would otherwise erase what was
learned before it."""
VARY_EVERY = 16
"""Drafting steps of which one may differ by a draft, to separate c1 from c0."""


class GoodputDepth:
    """The depth with the largest expected goodput, learned from the steps that it observes."""

    def __init__(self, max_depth: int = 8, probe_share: float = 0.01, padded: Sequence[PaddedBatch] = ()) -> None:
        """`padded` are the shapes of padded batches. The first that covers a batch is its shape. A batch without one is
        ragged."""
        if max_depth < 1 or not 0.0 <= probe_share <= 0.01:
            raise InvalidConfig(
                f"goodput needs max_depth >= 1 and probe_share in [0, 0.01]; got {max_depth}, {probe_share}"
            )
        self.max_depth = max_depth
        self._acceptance = Acceptance[TrafficClass](max_depth)
        self._times = StepTime()
        self._switch_on = SwitchOnCost()
        self._prefill = DraftPrefillCost()
        self._prompts = PromptLoad()
        self._probing = Probing(probe_share)
        self._drafts = BestDrafts(self._acceptance, self._times, self._switch_on, self._prefill, self._prompts)
        self._num_skipped, self._skipped_batch = 0, 0  # steps still to skip, and the batch that was decided for
        self._baselines = Baselines()
        self._ragged, self._padded = RaggedBatch(), padded
        self._probed: dict[TrafficClass, float] = {}
        """Traffic classes probed since they last drafted because it pays, with the expected acceptance of the first draft."""

    @property
    def advantage(self) -> float | None:
        """Expected speed of the best drafts over plain decoding at the last decision; None while costs are unknown."""
        return self._drafts.advantage

    def calibrate(self, passes: Mapping[int, float], per_token: float = 0.0) -> None:
        """Start from the {target rows: seconds} of a warm-up and the time that a token of context adds to a pass. Without
        this call the policy learns the costs from steps."""
        self._times.calibrate(passes, per_token)

    def calibrate_drafts(
        self, method: str, lines: Mapping[int, LinearCost], prefill_seconds: float | None = None
    ) -> None:
        """Start from the draft times of a warm-up, by number of sequences. `prefill_seconds` is its time of draft prefill per
        token. If None, the policy learns that time from steps."""
        self._times.calibrate_drafts(method, lines)
        if prefill_seconds is not None:
            self._prefill.calibrate(method, prefill_seconds)

    def alphas(self, traffic: TrafficClass) -> tuple[float, ...]:
        """Conditional acceptance by position, as estimated now."""
        return self._acceptance.alphas(traffic)

    def observe(self, step: StepObservation) -> None:
        self._switch_on.observe(step, self._times.expected(step) if step.drafting else None)
        self._prefill.observe(step)
        self._prompts.observe(step)
        if not step.drafting:
            is_timed = step.is_timed and not step.prefill_rows
            self._baselines.observe_plain(step.batch, is_timed, self._is_loss_by(step))
        self._times.observe(step)
        if any(seen.drafted or seen.requested for seen in step.rounds):
            self._num_skipped = 0
        rounds = [seen for seen in step.rounds if not seen.is_behind]
        counts = Counter([seen.traffic for seen in rounds])
        for seen in rounds:
            age = min(1.0, _MAX_AGEING / counts[seen.traffic])
            self._acceptance.observe(
                seen.traffic, seen.drafted, seen.accepted, seen.requested, seen.num_nodes, seen.path, age
            )
        for traffic, expected in self._probed.items():
            probed = [seen for seen in rounds if seen.traffic == traffic and (seen.drafted or seen.requested)]
            if probed:
                accepted = sum(seen.is_first_accepted for seen in probed)
                loss = self._added_share(step) - accepted / step.batch
                self._probing.observe(traffic, len(probed), accepted, expected, loss, step.is_timed)

    def restart(self, traffic: TrafficClass, alpha: float) -> None:
        self._num_skipped = 0
        self._acceptance.restart(traffic, alpha)
        self._probing.restart(traffic)
        self._probed.pop(traffic, None)

    def expect_prompts(self, rows: int) -> None:
        self._prompts.expect(rows)

    def skip_step(self, batch: int) -> bool:
        has_changed = _BATCH_CHANGE * abs(batch - self._skipped_batch) > self._skipped_batch
        if self._num_skipped == 0 or has_changed or self._probing.is_pending:
            return False
        self._num_skipped -= 1
        self._probing.begin_step(())
        return True

    def decide(self, batch: Sequence[DepthCandidate]) -> list[int]:
        depths = self._best(batch)
        if self._baselines.is_due(len(batch), any(depths), self.advantage):
            return [0] * len(batch)
        drafting = {candidate.traffic for candidate, depth in zip(batch, depths, strict=True) if depth}
        for traffic in drafting:
            self._probed.pop(traffic, None)
        if self._baselines.num_drafted(len(batch)) % VARY_EVERY == VARY_EVERY - 1:
            self._vary(batch, depths)
        self._probing.begin_step(drafting)
        self._probe(batch, depths, drafting)
        return depths

    def _best(self, batch: Sequence[DepthCandidate]) -> list[int]:
        depths = self._drafts.find(batch, self._shape_of(batch))
        if depths is None and self.advantage is not None and not self._drafts.is_waiting:
            self._num_skipped, self._skipped_batch = SKIPPED_STEPS, len(batch)
        return depths or [0] * len(batch)

    def _vary(self, batch: Sequence[DepthCandidate], depths: list[int]) -> None:
        """Change depths by one for methods that were timed at one depth only: in the direction that loses less, within the
        limits."""
        slots = self._shape_of(batch).slots(len(batch))
        has_slope = {method: self._times.has_slope(method, slots) for method in {c.traffic.method for c in batch}}
        if all(has_slope.values()) or not any(depths):
            return
        is_up = self._loses_less_deeper(batch, depths)
        for i, (candidate, depth) in enumerate(zip(batch, depths, strict=True)):
            if depth and not has_slope[candidate.traffic.method]:
                can_grow = depth < min(candidate.max_depth, self.max_depth)
                depths[i] = depth + 1 if can_grow and (is_up or depth == 1) else max(1, depth - 1)

    def _loses_less_deeper(self, batch: Sequence[DepthCandidate], depths: Sequence[int]) -> bool:
        """Whether one draft more in every sequence loses fewer tokens than one draft less. A pass may take much longer from
        some number of rows on, just above the best depth."""
        shape, context = self._shape_of(batch), sum([candidate.num_tokens for candidate in batch])
        slots, deepest, drafting = shape.slots(len(batch)), max(depths), [i for i, depth in enumerate(depths) if depth]
        costs, plain = self._times.costs(slots, context), self._times.plain(slots, context)
        if costs is None or not plain or self.advantage is None or deepest == 1:
            return True
        less, same, more = (
            costs.verify(shape.rows(len(batch), len(drafting), deepest + change)) for change in (-1, 0, 1)
        )
        survival = [(0.0, *self._acceptance.survival(batch[i].traffic), 0.0) for i in drafting]
        gained, lost = (
            sum([probs[min(depth, len(probs) - 1)] for probs in survival]) for depth in (deepest + 1, deepest)
        )
        rate, drafted = self.advantage * len(batch) / plain, max([line.per_depth for line in costs.lines.values()])
        return rate * (more - same + drafted) - gained <= lost - rate * (same - less + drafted)

    def _probe(self, batch: Sequence[DepthCandidate], depths: list[int], drafting: set[TrafficClass]) -> None:
        """One draft each (two to learn the slope) for a few sequences of a class that has long been unobserved. While its
        cost is hardly known the probe drafts for all of them: a step that drafts for few may use another executor."""
        unobserved = dict.fromkeys(c.traffic for c in batch if c.traffic not in drafting and c.max_depth)
        if not unobserved or self._times.plain(len(batch)) is None:
            self._probing.cancel()
            return
        methods = {traffic.method for traffic in drafting}
        unsettled = [name for name in unobserved if not self._times.is_settled(name.method)]
        chosen = {
            name: self._probe_sequences(name, batch, len(batch) if name in unsettled else SEQUENCES)
            for name in unobserved
        }
        losses = {name: self._loss(name, chosen[name], batch, methods) for name in unobserved}
        traffic = self._probing.pick(losses, unsettled)
        if traffic is None:
            return
        if self._probing.is_first(traffic):
            self._acceptance.discount(traffic)
        self._probed[traffic] = self._acceptance.survival(traffic)[0]
        for i in chosen[traffic]:
            depths[i] = min(self._probe_depth(traffic.method, batch), batch[i].max_depth)

    def _probe_sequences(self, traffic: TrafficClass, batch: Sequence[DepthCandidate], most: int) -> list[int]:
        """Up to `most` sequences of the traffic class, those with the cheapest draft prefill."""
        chosen = [i for i, c in enumerate(batch) if c.traffic == traffic and c.max_depth]
        return nsmallest(most, chosen, key=lambda i: self._prefill.seconds(batch[i]))

    def _probe_depth(self, method: str, batch: Sequence[DepthCandidate]) -> int:
        slots = self._shape_of(batch).slots(len(batch))
        return 2 if self._times.is_settled(method) and not self._times.has_slope(method, slots) else 1

    def _is_loss_by(self, step: StepObservation) -> bool:
        """Whether drafting as last decided loses against the time of this one plain step."""
        if not self._drafts.is_drafting or self.advantage is None:
            return False
        plain = self._times.plain(step.num_slots, step.context)
        return plain is not None and self.advantage * step.seconds / plain < self._drafts.min_advantage

    def _added_share(self, step: StepObservation) -> float:
        """Time that probes added to the step, as a share of a plain step; 0 if that is not known. If other drafts in the step
        pay, it is compared with the expected time of the step without probes."""
        plain = self._times.plain(step.num_slots, step.context)
        is_alone = all(seen.traffic in self._probed for seen in step.rounds if seen.requested)
        without = plain if is_alone else self._times.expected(step)
        if plain is None or without is None or step.prefill_rows:
            return 0.0
        return (step.seconds - without) / plain

    def _loss(
        self, traffic: TrafficClass, chosen: Sequence[int], batch: Sequence[DepthCandidate], methods: set[str]
    ) -> float:
        """Expected loss of a probe as a share of a plain step: the time that it adds, less the tokens that it gains.
        `methods` draft in this step anyway."""
        method, shape = traffic.method, self._shape_of(batch)
        slots, context = shape.slots(len(batch)), sum([candidate.num_tokens for candidate in batch])
        costs, plain = self._times.costs(slots, context), self._times.plain(slots, context)
        if plain is None:
            return 0.0
        seconds = sum(self._prefill.seconds(batch[i]) for i in chosen)
        if seconds:
            seconds += self._switch_on.seconds(len(batch))
        if costs is not None and method in costs.lines and method not in methods:
            depth = self._probe_depth(method, batch)
            seconds += costs.lines[method].seconds(depth)
            if not methods:
                rows = shape.rows(len(batch), len(chosen), depth)
                seconds += costs.network + costs.verify(rows) - plain
        accepted = self._acceptance.survival(traffic)[0] * self._acceptance.delivery(traffic) * len(chosen)
        return seconds / plain - accepted / len(batch)

    def _shape_of(self, batch: Sequence[DepthCandidate]) -> BatchShape:
        return next((shape for shape in self._padded if shape.covers(batch)), self._ragged)
