"""Runs a rolling change on live pools: observes workers as a gateway does, compares canary texts, and sets goals."""

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import ValidatedRequest
from paceline.policy.health import first_difference
from paceline.policy.scaling.desired import DesiredState
from paceline.policy.scaling.rollout import (
    Action,
    Compare,
    Finished,
    Remove,
    Rollout,
    RolloutRule,
    SetGoal,
    Verdict,
    WorkerView,
)
from paceline.targets import CATEGORY, PROMPT, SAMPLINGS, TargetPool
from paceline.wire.worker_spec import Directory, Member

logger = logging.getLogger(__name__)

POLL = 0.1
TEXT_SECONDS = 30.0
"""Time to generate the canary texts on one worker."""

Tokens = tuple[int, ...]


class LivePools(Directory, Protocol):
    """A running cluster whose desired state can be changed."""

    def desired(self) -> DesiredState: ...

    def edit(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Replace the desired state by the result of `change`, and return it."""
        ...


class RolloutRun:
    """One rolling change of one pool."""

    def __init__(
        self,
        pools: LivePools,
        gateway: TargetPool,
        report: Callable[[str], None] = logger.info,
        clock: Clock | None = None,
    ) -> None:
        """`gateway` observes the workers and generates the canary texts. `report` receives one line per action."""
        self._pools, self._gateway, self._report = pools, gateway, report
        self._clock = clock or WallClock()
        self._verdicts: dict[str, tuple[int, bool]] = {}
        """Epoch of the worker whose texts were compared, and whether they agree."""
        self._first_exits: dict[tuple[str, int], int] = {}

    def run(self, pool: str, revision: int, rule: RolloutRule, is_model_change: bool = False) -> str:
        """Returns the reason why the change was rolled back. It is empty if every worker of the pool has `revision`."""
        state = self._pools.desired()
        expected: Sequence[Tokens] | None = None
        if rule.compares and not is_model_change:
            expected = self._reference([goal.name for goal in state.of_pool(pool)])
        rollout = Rollout(state, pool, revision, rule)
        while True:
            action = rollout.next(self._views(), self._clock.now())
            if isinstance(action, Finished):
                return action.failure
            if action is None:
                time.sleep(POLL)
            else:
                self._act(action, expected)

    def _act(self, action: Action, expected: Sequence[Tokens] | None) -> None:
        if isinstance(action, SetGoal):
            goal = action.goal
            before = self._pools.desired().goal(goal.name)
            is_started = before is not None and before.revision == goal.revision
            trial = ", on trial" if goal.is_on_trial else ""
            self._report(f"{goal.name}: {'serves' if is_started else 'starts'} with revision {goal.revision}{trial}")
            self._pools.edit(lambda state: state.with_goal(goal))
        elif isinstance(action, Remove):
            self._report(f"{action.name}: drains")
            self._pools.edit(lambda state: state.without_goal(action.name))
        elif isinstance(action, Compare):
            texts = self._texts(action.name)
            wrong = _differences(texts, expected)
            agrees = not wrong
            self._report(f"{action.name}: canary texts {'agree' if agrees else f'differ: {wrong}'}")
            welcome = self._gateway.targets()[action.name].welcome
            self._verdicts[action.name] = (0 if welcome is None else welcome.epoch, agrees)

    def _views(self) -> Mapping[str, WorkerView]:
        states = {row.name: row.state for row in self._gateway.workers()}
        targets = self._gateway.targets()
        views = {}
        for member in self._pools.members():
            if member.phase == "gone":
                continue
            is_ready, epoch = states.get(member.name) == "ready", 0
            if member.role != "draft":
                target = targets.get(member.name)
                is_ready = target is not None and target.is_usable and not target.is_loading and not target.is_draining
                is_ready = is_ready and target is not None and target.member.address == member.address
                epoch = target.welcome.epoch if target is not None and target.welcome is not None else 0
            known, agrees = self._verdicts.get(member.name, (0, False))
            verdict: Verdict | None = ("agrees" if agrees else "differs") if epoch and known == epoch else None
            views[member.name] = WorkerView(member.revision, is_ready, self._num_exits(member), verdict)
        return views

    def _num_exits(self, member: Member) -> int:
        """Exits since the worker got its revision."""
        key = (member.name, member.revision)
        return member.life.restarts - self._first_exits.setdefault(key, member.life.restarts)

    def _reference(self, names: Sequence[str]) -> Sequence[Tokens]:
        """The canary texts of the pool, of its first ready worker."""
        deadline = self._clock.now() + TEXT_SECONDS
        while self._clock.now() < deadline:
            targets = self._gateway.targets()
            for name in names:
                if name in targets and targets[name].is_usable and not targets[name].is_loading:
                    texts = self._texts(name)
                    if texts is not None:
                        return texts
            time.sleep(POLL)
        raise PacelineError(
            f"no worker of {', '.join(names)} generates the canary texts that a rollout compares: see `paceline status`"
        )

    def _texts(self, name: str) -> Sequence[Tokens] | None:
        """The canary texts of one worker. None if it does not generate them in time."""
        events: queue.SimpleQueue[tuple[int, OutputEvent]] = queue.SimpleQueue()
        for i, sampling in enumerate(SAMPLINGS):
            request = ValidatedRequest(f"rollout-{name}-{i}-{time.monotonic_ns()}", PROMPT, sampling, category=CATEGORY)
            self._gateway.submit_to(name, request, lambda event, i=i: events.put((i, event)))  # type: ignore[misc]
        texts: list[Tokens] = [() for _ in SAMPLINGS]
        unfinished, deadline = len(SAMPLINGS), self._clock.now() + TEXT_SECONDS
        while unfinished:
            try:
                i, event = events.get(timeout=max(0.0, deadline - self._clock.now()))
            except queue.Empty:
                return None
            if not isinstance(event, StepOutput):
                return None
            texts[i] += tuple(event.tokens)
            unfinished -= event.finish_reason is not None
        return texts


def _differences(texts: Sequence[Tokens] | None, expected: Sequence[Tokens] | None) -> str:
    """Where the canary texts of a worker leave those of its pool, in words. Empty if they do not."""
    if texts is None:
        return "they were not generated in time"
    if expected is None:
        return ""
    found = (first_difference(text, other) for text, other in zip(texts, expected, strict=True))
    return "; ".join(f"text {i}, {where}" for i, where in enumerate(found) if where)
