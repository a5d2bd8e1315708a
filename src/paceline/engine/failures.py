"""Limits the effects of a failure: one request fails, a proposer's error costs drafts alone, and a long step is noticed.

`RequestFailure` is the failure of one request, with the text that its owner receives. `ProposerGuard` calls proposers so that
their errors cost drafts and never text. `StepTimePrediction` predicts how long the current step should take, from the steps
before it.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from paceline.core.errors import GenerationFailed, PacelineError, RankLost
from paceline.speculation import Proposer, SequenceProgress
from paceline.speculation.drafts import NO_COST, Draft, DraftBatch, DraftCost

logger = logging.getLogger(__name__)


class RequestFailure(NamedTuple):
    """The request has ended; `error` is for its owner only."""

    request_id: str
    error: PacelineError


def owner_error(error: BaseException) -> PacelineError:
    """The error that the owner of the failed request receives. Unexpected errors keep their text in the log."""
    if isinstance(error, PacelineError):
        return error
    kind = type(error).__name__
    failed = GenerationFailed(
        f"the engine failed on this request with {kind}: change its parameters; the log has details"
    )
    failed.__cause__ = error
    return failed


def is_isolated(error: BaseException) -> bool:
    """Whether the error may belong to one request. A panic of a Rust library is no `Exception`."""
    return (isinstance(error, Exception) and not isinstance(error, RankLost)) or type(
        error
    ).__name__ == "PanicException"


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Log an error of the block and continue: what follows does not depend on it."""
    try:
        yield
    except BaseException as error:
        if not is_isolated(error):
            raise
        logger.error("%s failed; the engine continues", what, exc_info=error)


T = TypeVar("T")


class ProposerGuard:
    """If a proposer raises for a batch, it is called again for each sequence. A sequence that raises alone is excluded: it
    decodes without drafts from then on. Its text is the same."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = proposers
        self._excluded: set[int] = set()
        self.num_failures = 0
        """Calls of a proposer that raised."""

    def excludes(self, sequence_id: int) -> bool:
        """Whether a proposer failed for this sequence."""
        return sequence_id in self._excluded

    def collect(self, method: str, sequence_ids: Sequence[int], deadline: float) -> tuple[dict[int, Draft], DraftCost]:
        """The drafts by sequence, and what the batch cost."""

        def collect(ids: Sequence[int]) -> DraftBatch:
            return self._proposers[method].collect(ids, deadline)

        try:
            batch = collect(sequence_ids)
            return batch.split(), batch.cost
        except Exception as error:
            self._note(method, error)
        drafts: dict[int, Draft] = {}
        for sequence_id in sequence_ids:
            alone = self._alone(method, sequence_id, lambda i=sequence_id: collect([i]).split())  # type: ignore[misc]
            drafts.update(alone or {})
        return drafts, NO_COST

    def observe(self, method: str, batch: Sequence[SequenceProgress]) -> None:
        """Report progress, without that of excluded sequences."""
        if self._excluded:
            batch = [progress for progress in batch if progress.sequence_id not in self._excluded]
        observe = self._proposers[method].observe
        try:
            if batch:
                observe(batch)
            return
        except Exception as error:
            self._note(method, error)
        for progress in batch:
            self._alone(method, progress.sequence_id, lambda progress=progress: observe([progress]))  # type: ignore[misc]

    def close(self, method: str, sequence_id: int) -> None:
        """End the sequence at its proposer. It may start again, after a preemption or with another method."""
        self._excluded.discard(sequence_id)
        self._close(method, sequence_id)

    def _alone(self, method: str, sequence_id: int, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._note(method, error)
            self._close(method, sequence_id)
            self._excluded.add(sequence_id)
            return None

    def _close(self, method: str, sequence_id: int) -> None:
        try:
            self._proposers[method].close([sequence_id])
        except Exception as error:
            self._note(method, error)

    def _note(self, method: str, error: Exception) -> None:
        self.num_failures += 1
        if self.num_failures.bit_count() == 1:  # 1, 2, 4, 8 …: a proposer may fail in every step
            logger.error("the proposer %s failed %d times", method, self.num_failures, exc_info=error)


FACTOR = 4.0
"""Longest step, as a multiple of the slowest recent one of its size."""
NUM_RECENT = 32
NUM_FIRST = 2
"""First steps of a size, which may compile kernels or capture graphs: they are not measured."""


class StepTimePrediction:
    """One thread calls `begin` and `end`; any thread reads `step_seconds`. A size is a power of two of scheduled tokens."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        """Longest time that the current step should take. None if no step of its size was measured yet."""
        self._recent: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._size = 0
        self._began: float | None = None

    def begin(self, num_tokens: int, now: float) -> None:
        """A step over `num_tokens` scheduled tokens begins."""
        self._size, self._began = num_tokens.bit_length(), now
        recent = self._recent.get(self._size)
        self.step_seconds = FACTOR * max(recent) if recent else None

    def end(self, now: float) -> None:
        """The step is over."""
        if self._began is None:
            return
        self._counts[self._size] = count = self._counts.get(self._size, 0) + 1
        if count > NUM_FIRST:
            self._recent.setdefault(self._size, deque(maxlen=NUM_RECENT)).append(now - self._began)
        self._began = None
