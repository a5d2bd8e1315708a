"""When to leave the depth policy out of a step: while nothing is drafted, decisions may take a small share of the time only."""

from collections.abc import Sequence

SHARE = 0.01
"""Share of the time of vLLM's steps that decisions take while the policy drafts nothing. Trial drafts come on top."""
MAX_STEPS = 32
"""Steps that one decision is paid for with, at most."""


class Pause:
    """Every step pays back `SHARE` of its time. While a decision is not paid back, and the policy would keep it anyway, steps
    are not observed. A step in which rows start, end or gain several tokens is never left out."""

    def __init__(self) -> None:
        self._debt = 0.0
        """Seconds that decisions took and that are not paid back."""
        self._num_rows: int | None = None
        """Rows for which the policy keeps its decision not to draft. None if it decides in the next step."""

    def covers(self, sampled: Sequence[Sequence[int]], seconds: float) -> bool:
        """Whether this step is left out. `seconds` is the time of vLLM's step."""
        self._debt = max(0.0, self._debt - SHARE * seconds)
        return self._debt > 0.0 and len(sampled) == self._num_rows and set(map(len, sampled)) == {1}

    @property
    def is_paid(self) -> bool:
        """Whether all decisions are paid back."""
        return self._debt <= 0.0

    def begin(self, num_rows: int) -> None:
        """The policy keeps its decision not to draft for this many rows."""
        self._num_rows = num_rows

    def end(self) -> None:
        """The policy decides in the next step."""
        self._num_rows = None

    def add_cost(self, cost: float, seconds: float) -> None:
        """A call without drafts took `cost`, after a step of `seconds`."""
        self._debt = min(self._debt + cost, MAX_STEPS * SHARE * seconds)
