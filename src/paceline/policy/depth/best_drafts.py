"""Whether to draft, and how deep: the best drafts by the estimated costs and acceptance, if they are worth their start cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.traffic import TrafficClass
from paceline.policy.depth.acceptance import Acceptance
from paceline.policy.depth.allocation import Allocation, BatchShape, Value
from paceline.policy.depth.observation import DepthCandidate
from paceline.policy.depth.prompt_load import PromptLoad
from paceline.policy.depth.start_cost import HORIZON, DraftPrefillCost, SwitchOnCost, horizon
from paceline.policy.depth.step_cost import Costs, StepTime

MARGIN = 0.03
"""Advantage over plain decoding, in addition to the start costs, from which drafting starts. It stops under a third of it."""


class BestDrafts:
    """Reads estimates that its owner updates. Its own state is whether the last drafts it found were worth it."""

    def __init__(
        self,
        acceptance: Acceptance[TrafficClass],
        times: StepTime,
        switch_on: SwitchOnCost,
        prefill: DraftPrefillCost,
        prompts: PromptLoad,
    ) -> None:
        self._acceptance, self._times, self._switch_on, self._prefill = acceptance, times, switch_on, prefill
        self._prompts = prompts
        self.is_drafting = False
        self.is_waiting = False
        """Whether the batch is growing: it decides when all sequences that need a draft prefill have joined."""
        self.advantage: float | None = None
        """Expected speed of the best drafts over plain decoding; None while costs are unknown."""

    @property
    def min_advantage(self) -> float:
        """The advantage below which a drafting batch stops."""
        return 1.0 + MARGIN / 3.0

    def find(self, batch: Sequence[DepthCandidate], shape: BatchShape) -> list[int] | None:
        """Depths by candidate; None if no candidate is to draft."""
        best, self.advantage, self.is_waiting = None, None, False
        # Only a padded batch computes prompts without leaving its graphs
        next_steps = self._prices(batch, shape, self._prompts.rows_per_token(batch) if shape.is_padded else 0.0)
        if batch and next_steps is not None:
            values = self._values(batch, next_steps.costs)
            if shape.is_padded:
                best = self._worthwhile_padded(batch, shape, values, next_steps)
            else:
                best = self._worthwhile(batch, shape, values, next_steps)
        self.is_drafting = best is not None
        return None if best is None else best.depths

    def _prices(self, batch: Sequence[DepthCandidate], shape: BatchShape, prompt_rows: float) -> "_Prices | None":
        context, slots = sum([candidate.num_tokens for candidate in batch]), shape.slots(len(batch))
        plain = self._times.plain(slots + prompt_rows * len(batch), context)
        costs = self._times.costs(slots, context, shape.is_padded)
        if plain is None or costs is None:
            return None
        if not shape.is_padded:
            plain += self._times.plain_host(len(batch))
        prompt_seconds = self._prefill.prompt_seconds(costs.lines)
        return _Prices(replace(costs, prompt_rows=prompt_rows, prompt_seconds=prompt_seconds), plain)

    def _values(self, batch: Sequence[DepthCandidate], costs: Costs) -> dict[TrafficClass, Value]:
        return {
            traffic: Value(self._acceptance.survival(traffic), self._acceptance.delivery(traffic))
            for traffic in dict.fromkeys([candidate.traffic for candidate in batch])
            if traffic.method in costs.lines
        }

    def _worthwhile(
        self,
        batch: Sequence[DepthCandidate],
        shape: BatchShape,
        values: Mapping[TrafficClass, Value],
        prices: "_Prices",
    ) -> Allocation | None:
        """Every sequence of a ragged batch has to recover its own draft prefill."""
        best = shape.allocate(batch, values, prices.costs)
        if best is None:
            return None
        excluded, plain = set[int](), prices.plain
        advantage, needed = best.rate * plain / len(batch), self._needed(batch, plain)
        if advantage > needed:
            saved = (1.0 - needed / advantage) * plain / len(batch)  # per sequence and plain step
            excluded = self._prefill.unprofitable(batch, best.depths, saved)
        if excluded:
            best = _allocate_others(batch, shape, values, prices.costs, excluded)
            advantage = best.rate * plain / len(batch) if best else 1.0
        self.advantage = advantage
        return best if advantage > needed else None

    def _worthwhile_padded(
        self,
        batch: Sequence[DepthCandidate],
        shape: BatchShape,
        values: Mapping[TrafficClass, Value],
        next_steps: "_Prices",
    ) -> Allocation | None:
        """The steps of a padded batch take as long for a sequence without drafts as for one with drafts. The batch therefore
        drafts as a whole, if that recovers the draft prefills of all its sequences together: within the horizon if other
        sequences take their places, and within their own texts if none do."""
        lasting = self._prices(batch, shape, self._prompts.lasting_rows_per_token(batch))
        assert lasting is not None
        best, advantage = _best_and_advantage(batch, shape, values, next_steps, lasting, set())
        if best is None:
            return None
        behind = self._prefill.behind(batch, best.depths)
        if 2 * len(behind) > sum([depth > 0 for depth in best.depths]):
            self.is_drafting = False  # these are other sequences than those that drafted
        if not self.is_drafting and self._prompts.is_growing(batch):
            self.advantage, self.is_waiting = advantage, True
            return None
        needed = self._needed(batch, next_steps.plain)
        if advantage <= needed:
            self.advantage = advantage
            return None
        slots = _slot_seconds([batch[i] for i in behind], values, best)
        excluded = {
            i for i in behind if self._prefill.seconds(c := batch[i]) > horizon(c) * slots[c.traffic, c.max_depth]
        }
        if excluded:
            best, advantage = _best_and_advantage(batch, shape, values, next_steps, lasting, excluded)
        late = [i for i in behind if i not in excluded]
        if best is not None and late and advantage > needed:
            cost = sum([self._prefill.seconds(batch[i]) for i in late])
            drafting = [c for c, depth in zip(batch, best.depths, strict=True) if depth]
            saved = (1.0 - needed / advantage) * lasting.plain / len(batch) * HORIZON * len(drafting)
            if saved > cost:
                alone = self._prices(batch, shape, 0.0)
                assert alone is not None
                _, most = _best_and_advantage(batch, shape, values, alone, alone, excluded)
                saved = (1.0 - needed / most) * alone.plain / len(batch) * sum([horizon(c) for c in drafting])
            if saved < cost:
                best, advantage = _best_and_advantage(batch, shape, values, next_steps, lasting, {*behind})
        self.advantage = advantage
        return best if advantage > needed else None

    def _needed(self, batch: Sequence[DepthCandidate], plain: float) -> float:
        """The advantage that drafts must have: the margin, and at a switch also its cost within the horizon."""
        if self.is_drafting:
            return self.min_advantage
        steps = sum([horizon(candidate) for candidate in batch]) / len(batch)
        return 1.0 + MARGIN + self._switch_on.seconds(len(batch)) / (steps * plain)


@dataclass(frozen=True, slots=True)
class _Prices:
    """Costs of drafting and seconds of a plain step, each including the prompts in the same step."""

    costs: Costs
    plain: float


def _slot_seconds(
    candidates: Sequence[DepthCandidate], values: Mapping[TrafficClass, Value], best: Allocation
) -> dict[tuple[TrafficClass, int], float]:
    """By class and `max_depth`, the time that the batch needs for what it loses with each token of a sequence that alone
    does not draft: one that takes twice the steps occupies its slot twice as long, which another sequence would use."""
    deepest = max(best.depths)
    kinds = {(candidate.traffic, candidate.max_depth): values[candidate.traffic] for candidate in candidates}
    return {
        (traffic, most): value.delivery * sum(value.survival[: min(most, deepest)]) / best.rate
        for (traffic, most), value in kinds.items()
    }


def _best_and_advantage(
    batch: Sequence[DepthCandidate],
    shape: BatchShape,
    values: Mapping[TrafficClass, Value],
    next_steps: _Prices,
    lasting: _Prices,
    excluded: set[int],
) -> tuple[Allocation | None, float]:
    """The best drafts for the next steps, and their advantage there or with the lasting load, whichever is less."""
    best = _allocate_others(batch, shape, values, next_steps.costs, excluded)
    if best is None:
        return None, 1.0
    advantage = best.rate * next_steps.plain / len(batch)
    if lasting.costs.prompt_rows > next_steps.costs.prompt_rows:
        with_prompts = _allocate_others(batch, shape, values, lasting.costs, excluded)
        advantage = min(advantage, with_prompts.rate * lasting.plain / len(batch) if with_prompts else 1.0)
    return best, advantage


def _allocate_others(
    batch: Sequence[DepthCandidate],
    shape: BatchShape,
    values: Mapping[TrafficClass, Value],
    costs: Costs,
    excluded: set[int],
) -> Allocation | None:
    """The best drafts without those of the excluded sequences; None if few are left."""
    if not excluded:
        return shape.allocate(batch, values, costs)
    others = [c._replace(max_depth=0) if i in excluded else c for i, c in enumerate(batch)]
    best = shape.allocate(others, values, costs)
    if best is not None and 2 * sum(best.depths) < max(best.depths) * len(batch):
        return None  # HAZARD: a padded batch has the same rows for all; one that drafts for few runs on the host
    return best
