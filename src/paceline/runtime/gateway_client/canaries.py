"""Canary requests: every target worker regularly generates the same few tokens, and the results are compared."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.cluster.health import CanaryVote, WorkerState
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.runtime.gateway_client.stream import Stream
from paceline.runtime.gateway_client.target_connection import TargetConnection

logger = logging.getLogger(__name__)

SAMPLING = SamplingParams(max_tokens=8, temperature=1.0, seed=20261115, ignore_eos=True)
SAMPLINGS = (SAMPLING, replace(SAMPLING, max_tokens=16), replace(SAMPLING, max_tokens=16, temperature=0.0))
"""Sampling of the canary texts that a rollout compares."""
PROMPT = tuple(range(1, 9))
CATEGORY = "canary"
DOUBT_FACTOR = 10
"""A worker whose last canary was wrong is checked this many times as often."""


class Canaries:
    """Submits a canary to each worker at an interval and reports the result to the worker's health."""

    def __init__(
        self, seconds: float, targets: Mapping[str, TargetConnection], submit: Callable[[Stream], None]
    ) -> None:
        """`submit` sends a stream to the worker it is pinned to. `seconds` is the interval, and 0 turns canaries off."""
        self._seconds = seconds
        self._targets = targets
        self._submit = submit
        self._vote = CanaryVote()
        self._count = 0

    def submit_if_due(self, target: TargetConnection, now: float) -> None:
        is_alive = target.welcome is not None and target.state in (WorkerState.READY, WorkerState.UNHEALTHY)
        is_alive = is_alive and not target.is_draining
        if not self._seconds or not is_alive or target.is_loading or now < target.next_canary:
            return
        target.next_canary = now + (self._seconds / DOUBT_FACTOR if target.health.is_in_doubt else self._seconds)
        self._count += 1
        name, tokens = target.name, list[int]()

        def listen(event: OutputEvent) -> None:
            if isinstance(event, StepOutput):
                tokens.extend(event.tokens)
                if event.finish_reason is not None:
                    self._compare(name, tuple(tokens))

        request = Request(f"canary-{self._count}", PROMPT, SAMPLING, category=CATEGORY)
        self._submit(Stream(request, listen, pinned=name))

    def forget(self, worker: str) -> None:
        """Drop the last result of a worker that left or restarted."""
        self._vote.forget(worker)

    def _compare(self, name: str, tokens: tuple[int, ...]) -> None:
        for worker, agrees in self._vote.add(name, tokens).items():
            target = self._targets.get(worker)
            if target is None:
                continue
            if worker == name:
                target.health.canary(agrees)
                if not agrees:
                    logger.error("target worker %s generated other canary tokens than its pool: %s", worker, tokens)
            elif not agrees:
                target.next_canary = 0.0  # this result outvoted it: check it again before it is marked unhealthy
