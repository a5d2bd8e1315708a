"""Canary generations: every target worker says the same few tokens now and then."""

import logging
from collections.abc import Callable, Mapping

from paceline.cluster.health.canary import CanaryJury
from paceline.cluster.health.health import WorkerState
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.runtime.gateway_client.stream import Event, Stream
from paceline.runtime.gateway_client.target_connection import TargetLine

logger = logging.getLogger(__name__)

SAMPLING = SamplingParams(max_tokens=8, temperature=1.0, seed=20261115, ignore_eos=True)
PROMPT = tuple(range(1, 9))
CATEGORY = "canary"


class Canaries:
    """Decides when a worker is asked and tells its health what the answer was worth."""

    def __init__(self, seconds: float, lines: Mapping[str, TargetLine], start: Callable[[Stream], None]) -> None:
        """`start` sends a stream to the worker it is pinned to. `seconds` 0: never ask."""
        self._seconds = seconds
        self._lines = lines
        self._start = start
        self._jury = CanaryJury()
        self._count = 0

    def ask(self, line: TargetLine, now: float) -> None:
        """Ask this worker if it is its time."""
        alive = line.welcome is not None and line.state in (WorkerState.READY, WorkerState.UNHEALTHY)
        if not self._seconds or not alive or line.is_loading or now < line.next_canary:
            return
        line.next_canary = now + (self._seconds / 10 if line.health.in_doubt else self._seconds)
        self._count += 1
        name, tokens = line.name, list[int]()

        def listen(event: Event) -> None:
            if isinstance(event, StepOutput):
                tokens.extend(event.tokens)
                if event.finish_reason is not None:
                    self._judge(name, tuple(tokens))

        request = Request(f"canary-{self._count}", PROMPT, SAMPLING, category=CATEGORY)
        self._start(Stream(request, listen, pinned=name))

    def forget(self, worker: str) -> None:
        """It left or started anew: what it said counts no more."""
        self._jury.forget(worker)

    def _judge(self, name: str, answer: tuple[int, ...]) -> None:
        for worker, agrees in self._jury.hear(name, answer).items():
            line = self._lines.get(worker)
            if line is None:
                continue
            if worker == name:
                line.health.canary(agrees)
                if not agrees:
                    logger.error("target worker %s says something else than its pool: %s", worker, answer)
            elif not agrees:
                line.next_canary = 0.0  # the others outvote it now: hear it again before it is condemned
