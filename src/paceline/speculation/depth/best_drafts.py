"""Whether to draft, and how deep: the best drafts by the estimated costs and acceptance, if they are worth their start cost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.speculation.depth.acceptance import Acceptance
from paceline.speculation.depth.allocation import Allocation, Value
from paceline.speculation.depth.padded_batch import BatchShape
from paceline.speculation.depth.policy import Candidate, method_of
from paceline.speculation.depth.prompt_load import PromptLoad
from paceline.speculation.depth.start_costs import DraftPrefillCost, SwitchOnCost, horizon
from paceline.speculation.depth.step_time import Costs, StepTime

MARGIN = 0.03
"""Advantage over plain decoding, besides the start costs, from which drafting starts; it stops under a third of it."""


class BestDrafts:
    """Reads estimates that its owner updates. Its own state is whether the last drafts it found were worth it."""

    def __init__(
        self,
        acceptance: Acceptance,
        times: StepTime,
        switch_on: SwitchOnCost,
        prefill: DraftPrefillCost,
        prompts: PromptLoad,
    ) -> None:
        self._acceptance, self._times, self._switch_on, self._prefill = acceptance, times, switch_on, prefill
        self._prompts = prompts
        self.is_drafting = False
        self.advantage: float | None = None
        """Expected speed of the best drafts over plain decoding; None while costs are unknown."""

    @property
    def min_advantage(self) -> float:
        """The advantage below which a drafting batch stops."""
        return 1.0 + MARGIN / 3.0

    def find(self, batch: Sequence[Candidate], shape: BatchShape) -> list[int] | None:
        """Depths by candidate; None if no candidate is to draft."""
        context, slots = sum([candidate.num_tokens for candidate in batch]), shape.slots(len(batch))
        # Only a padded batch computes prompts without leaving its graphs
        prompt_rows = self._prompts.rows_per_token(batch) if shape.is_padded else 0.0
        plain = self._times.plain(slots + prompt_rows * len(batch), context)
        costs = self._times.costs(slots, context)
        best, self.advantage = None, None
        if batch and plain is not None and costs is not None:
            costs = replace(costs, prompt_rows=prompt_rows, prompt_seconds=self._prefill.prompt_seconds(costs.lines))
            best = self._worthwhile(batch, shape, self._values(batch, costs), costs, plain)
        self.is_drafting = best is not None
        return None if best is None else best.depths

    def _values(self, batch: Sequence[Candidate], costs: Costs) -> dict[str, Value]:
        return {
            category: Value(self._acceptance.survival(category), self._acceptance.delivery(category))
            for category in dict.fromkeys([candidate.category for candidate in batch])
            if method_of(category) in costs.lines
        }

    def _worthwhile(
        self, batch: Sequence[Candidate], shape: BatchShape, values: Mapping[str, Value], costs: Costs, plain: float
    ) -> Allocation | None:
        best, excluded = shape.allocate(batch, values, costs), set[int]()
        if best is None:
            return None
        advantage, needed = best.rate * plain / len(batch), self._needed(batch, plain)
        if advantage > needed:
            saved = (1.0 - needed / advantage) * plain / len(batch)  # per sequence and plain step
            excluded = self._prefill.unprofitable(batch, best.depths, saved)
        if excluded:
            others = [c._replace(max_depth=0) if i in excluded else c for i, c in enumerate(batch)]
            best = shape.allocate(others, values, costs)
            if best is not None and 2 * sum(best.depths) < max(best.depths) * len(batch):
                best = (
                    None  # HAZARD: a padded batch has the same rows for all; one that drafts for few runs on the host
                )
            advantage = best.rate * plain / len(batch) if best else 1.0
        self.advantage = advantage
        if best is None or advantage <= needed:
            return None
        return self._with_excluded(batch, excluded, values, best) if shape.is_padded else best

    def _needed(self, batch: Sequence[Candidate], plain: float) -> float:
        """The advantage that drafts must have: the margin, and at a switch also its cost within the horizon."""
        if self.is_drafting:
            return self.min_advantage
        steps = sum([horizon(candidate) for candidate in batch]) / len(batch)
        return 1.0 + MARGIN + self._switch_on.seconds(len(batch)) / (steps * plain)

    def _with_excluded(
        self, batch: Sequence[Candidate], excluded: set[int], values: Mapping[str, Value], best: Allocation
    ) -> Allocation:
        """A padded batch has rows for excluded sequences too. One of them drafts if its draft prefill takes less time than the
        batch needs for the tokens that the drafts gain."""
        depths, deepest = list(best.depths), max(best.depths)
        for i in excluded:
            depth, value = min(batch[i].max_depth, deepest), values[batch[i].category]
            gained = value.delivery * sum(value.survival[:depth])
            rounds = horizon(batch[i]) / (1.0 + gained)
            if self._prefill.seconds(batch[i]) < rounds * gained / best.rate:
                depths[i] = depth
        return replace(best, depths=depths)
