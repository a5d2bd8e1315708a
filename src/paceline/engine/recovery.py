"""Continues after a failed step without the requests that make it fail.

`recover` finds the sequence that makes a step fail: it runs the step again for halves of the batch. `EngineRecovery` applies
this to an engine: it ends the requests that fail alone, and a probe request shows whether the engine works at all.
"""

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.output import StepOutput
from paceline.core.request import SamplingParams, SpeculationParams, ValidatedRequest
from paceline.core.sequence import Sequence
from paceline.engine.commit import Requests
from paceline.engine.failures import is_isolated
from paceline.engine.scheduler import Scheduler
from paceline.engine.selector import ExecutorSelector

logger = logging.getLogger(__name__)

S = TypeVar("S")
R = TypeVar("R")


@dataclass(slots=True)
class Recovery(Generic[S, R]):
    """The result of `recover`."""

    outputs: list[R] = field(default_factory=list)
    culprits: list[tuple[S, BaseException]] = field(default_factory=list)
    """Sequences that fail alone, and how."""
    has_succeeded: bool = False
    """Whether a step of some sequences was computed. Otherwise the engine itself may have failed."""


def recover(
    sequences: Seq[S], error: BaseException, step: Callable[[Collection[S]], tuple[bool, list[R]]]
) -> Recovery[S, R]:
    """Run a failed step for each half of `sequences`, and again for the halves of a half that fails. A single sequence is run
    a second time: its failure may have passed.

    `step` runs the given sequences only. It returns whether it computed anything, and the outputs. `error` is the error of the
    step with all of them.
    """
    found: Recovery[S, R] = Recovery()
    pending = [(list(sequences), error, len(sequences) == 1)]
    while pending:
        group, last, again = pending.pop()
        if not is_isolated(last):
            raise last
        if len(group) == 1 and not again:
            found.culprits.append((group[0], last))
            continue
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            if not half:
                continue
            try:
                computed, outputs = step(half)
            except BaseException as failure:
                pending.append((half, failure, False))
            else:
                found.outputs += outputs
                found.has_succeeded |= computed
    return found


PROBE_ID = "paceline-probe"
"""Id of the request that shows whether the engine works at all."""


class EngineRecovery:
    """Runs a failed step again in parts, on the host, and ends the requests that fail alone."""

    def __init__(
        self,
        requests: Requests,
        scheduler: Scheduler,
        executors: ExecutorSelector,
        step: Callable[[], list[StepOutput]],
    ) -> None:
        """`step` runs one step of the sequences to which the scheduler is restricted."""
        self._requests, self._scheduler, self._executors, self._step = requests, scheduler, executors, step

    def recover(self, error: BaseException) -> list[StepOutput]:
        """The outputs of the parts. Nothing of the failed step was committed. Raises `error` if the engine has failed."""
        sequences = [*self._scheduler.running, *self._scheduler.waiting]
        if not sequences or not is_isolated(error):
            raise error
        logger.error("a step of %d sequences failed; it is run again in parts", len(sequences), exc_info=error)
        with self._executors.host_only():
            try:
                found = recover(sequences, error, self._step_of)
                for sequence, cause in found.culprits:
                    self._requests.fail(sequence, cause)
                if found.culprits and not found.has_succeeded and not self._is_working():
                    raise error
            finally:
                self._scheduler.restrict(None)
        return found.outputs

    def _step_of(self, sequences: Collection[Sequence]) -> tuple[bool, list[StepOutput]]:
        """A step of these sequences only: whether it computed anything, and its outputs."""
        self._scheduler.restrict(frozenset(sequence for sequence in sequences if not sequence.is_finished))
        before = self._executors.counts.total()
        outputs = self._step()
        return self._executors.counts.total() > before, outputs

    def _is_working(self) -> bool:
        """Whether the engine can compute a request that is known to be good."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        request = ValidatedRequest(PROBE_ID, (0,), sampling, SpeculationParams(enabled=False))
        failures, outputs = self._requests.pop_failures(), list[StepOutput]()
        with suppress(Exception):
            self._requests.add(request)
            _, outputs = self._step_of(self._requests.sequences[PROBE_ID])
        has_failed = bool(self._requests.pop_failures())
        self._requests.return_failures(failures)
        return bool(outputs) and not has_failed
