"""Finds the sequence that makes a step fail, by running the step again for halves of the batch."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.engine.isolation.failures import is_isolated

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
    sequences: Sequence[S], error: BaseException, step: Callable[[Collection[S]], tuple[bool, list[R]]]
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
