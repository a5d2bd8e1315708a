"""Swaps the draft of a pool under load: workers with the new draft start in addition to the current workers, and stay if their
draft is better.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from paceline.core.clock import Clock, WallClock
from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.status import GoodputSums
from paceline.deploy.processes import LivePools
from paceline.policy.pairing.draft_trial import USED_AT_ONCE, DraftTrial, TrialDecision, TrialLimits, TrialVerdict
from paceline.policy.scaling.changes import check_memory
from paceline.policy.scaling.desired import DesiredState, WorkerGoal, free_numbers
from paceline.targets import TargetPool

logger = logging.getLogger(__name__)


class DraftSwap:
    """One swap. `start` starts the new workers, `poll` decides, `end` keeps the new or the old workers."""

    def __init__(
        self,
        pools: LivePools,
        gateway: TargetPool,
        pool: str,
        model: str,
        limits: TrialLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`gateway` observes the workers. `model` is the new draft, written as `model` of a draft pool. With 0 seconds in
        `limits` the draft is used as soon as it is loaded."""
        self._pools, self._gateway, self._pool, self._model = pools, gateway, pool, model
        self._limits, self._clock = limits or TrialLimits(), clock or WallClock()
        self._old: tuple[str, ...] = ()
        self._new: tuple[str, ...] = ()
        self._revision = 0
        self._trial: DraftTrial | None = None
        self._before: dict[tuple[str, str], GoodputSums] = {}
        """Sums at the start of the trial, by target and draft worker."""
        self._stale: dict[str, str] = {}
        """Refusals of earlier workers with the same names, which status still shows at the start."""

    def start(self) -> None:
        """Start as many workers with the new draft as there are with the old draft."""

        def change(state: DesiredState) -> DesiredState:
            goals = state.of_pool(self._pool)
            if any(goal.is_on_trial for goal in goals):
                raise InvalidConfig(f"pool {self._pool!r} is changing: wait for its end, or run `paceline apply`")
            changed = state.with_revision(with_draft(state.config, self._pool, self._model))
            self._old, self._revision = tuple(goal.name for goal in goals), changed.newest
            added = [f"{self._pool}-{number}" for number in free_numbers(goals, len(goals) or 1)]
            self._new = tuple(added)
            for name in added:
                changed = changed.with_goal(WorkerGoal(name, self._pool, changed.newest, is_on_trial=True))
            check_memory(state, changed)
            return changed

        self._stale = {row.name: row.refusal for row in self._gateway.workers() if row.refusal}
        self._pools.edit(change)
        logger.info("%s join %s for a trial", ", ".join(self._new), self._pool)

    @property
    def refusal(self) -> str | None:
        """The reason why a new worker cannot draft for any target. None if no worker is refused."""
        refusals = {row.name: row.refusal for row in self._gateway.workers() if row.refusal}
        fresh = (refusals[name] for name in self._new if name in refusals and refusals[name] != self._stale.get(name))
        return next(fresh, None)

    @property
    def is_loaded(self) -> bool:
        """Whether a target uses each of the new workers."""
        ready = {
            drafter.name
            for report in self._gateway.reports()
            for drafter in report.status.drafters
            if drafter.state == "ready"
        }
        return ready.issuperset(self._new)

    def poll(self) -> TrialDecision:
        """The decision so far. The trial starts with the first call, when the new workers are loaded."""
        sums = self._sums()
        if self._trial is None:
            self._trial, self._before = DraftTrial(self._clock.now(), self._limits), sums
        current, candidate = GoodputSums(), GoodputSums()
        for (target, name), total in sums.items():
            grown = total.since(self._before.get((target, name), GoodputSums()))
            if name in self._old:
                current += grown
            elif name in self._new:
                candidate += grown
        if not self._limits.seconds:
            return USED_AT_ONCE
        if not self._old:  # the pool was empty: the new draft is better than none if targets use it
            return TrialDecision(TrialVerdict.KEEP, None, "the pool had no other draft")
        return self._trial.decide(current, candidate, self._clock.now())

    def end(self, is_kept: bool) -> None:
        """Drain the workers of the losing draft. The workers of the kept draft then serve all sequences."""

        def change(state: DesiredState) -> DesiredState:
            for name in self._old if is_kept else self._new:
                state = state.without_goal(name)
            if not is_kept:
                return state.without_revision(self._revision)
            for name in self._new:
                goal = state.goal(name)
                if goal is not None:
                    state = state.with_goal(replace(goal, is_on_trial=False))
            return state.settled(self._revision)

        self._pools.edit(change)

    def run(self, wait: Callable[[], bool], load_seconds: float, report: Callable[[str], None]) -> TrialDecision:
        """Run the whole swap. `wait` pauses between two looks, and returns False to give up. The old draft stays if the swap is
        given up or fails. The new workers must be ready within `load_seconds`."""
        self.start()
        decision = TrialDecision(TrialVerdict.ROLL_BACK, None, "the trial was interrupted")
        try:
            decision = self._run(wait, self._clock.now() + load_seconds, report)
        finally:
            self.end(decision.verdict is TrialVerdict.KEEP)
        return decision

    def _run(self, wait: Callable[[], bool], deadline: float, report: Callable[[str], None]) -> TrialDecision:
        interrupted = TrialDecision(TrialVerdict.ROLL_BACK, None, "the trial was interrupted")
        while not self.is_loaded:
            states = (f"{row.name} {row.state}" for row in self._gateway.workers() if row.name in self._new)
            report(f"the new draft loads: {', '.join(states) or 'its workers start'}")
            if (refusal := self.refusal) is not None:
                return TrialDecision(TrialVerdict.ROLL_BACK, None, f"the new draft is refused: {refusal}")
            if self._clock.now() > deadline:
                text = "the new draft was not ready in time; see the logs of its workers"
                return TrialDecision(TrialVerdict.ROLL_BACK, None, text)
            if not wait():
                return interrupted
        while (decision := self.poll()).verdict is TrialVerdict.CONTINUE:
            report(decision.reason)
            if not wait():
                return interrupted
        return decision

    def _sums(self) -> dict[tuple[str, str], GoodputSums]:
        return {
            (report.name, drafter.name): drafter.goodput
            for report in self._gateway.reports()
            for drafter in report.status.drafters
        }


def with_draft(config: ClusterConfig, pool: str, model: str) -> ClusterConfig:
    """The settings with another draft in one pool. Raises `InvalidConfig` unless it is a draft pool."""
    if pool not in {draft.name for draft in config.drafts}:
        names = ", ".join(draft.name for draft in config.drafts) or "none"
        raise InvalidConfig(f"there is no draft pool {pool!r}; draft pools of this cluster: {names}")
    return replace(
        config, pools=tuple(replace(spec, model=model) if spec.name == pool else spec for spec in config.pools)
    )
