"""How large a pass is for the drafts in it, and so which drafts are best: most passes hold what is in them and no more."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.speculation.depth.allocation import Allocation, Value, allocate
from paceline.speculation.depth.policy import Candidate
from paceline.speculation.depth.step_time import Costs


class Rounds(Protocol):
    @property
    def is_even(self) -> bool:
        """Whether a row is there for everybody, used or not."""
        ...

    def seats(self, batch: int, /) -> int:
        """Sequences that a pass over so many has room for."""
        ...

    def rows(self, batch: int, drafting: int, depth: int) -> int:
        """Of a pass over so many, some of whom have drafts so deep."""
        ...

    def allocate(self, batch: Sequence[Candidate], values: Mapping[str, Value], costs: Costs) -> Allocation | None:
        """The best drafts; None if no candidate may draft. Every category with a value has a method whose costs are known."""
        ...


class RaggedRounds:
    """`Rounds`."""

    is_even = False

    def seats(self, batch: int, /) -> int:
        return batch

    def rows(self, batch: int, drafting: int, depth: int) -> int:
        return batch + drafting * depth

    def allocate(self, batch: Sequence[Candidate], values: Mapping[str, Value], costs: Costs) -> Allocation | None:
        return allocate(batch, values, costs)
