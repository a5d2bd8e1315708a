"""The interface of every depth rule: what happened goes in, a depth for each sequence comes out. No clock, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class RoundObservation:
    """One sequence's round: how many tokens deep its draft was and how many of them the target kept."""

    sequence_id: int
    category: str
    drafted: int
    accepted: int
    asked: int = 0
    """The depth asked for; a proposer may answer with less or nothing. 0: not asked, or not known."""
    num_nodes: int | None = None
    """Of a tree, whose `drafted` is its levels. None: a chain."""
    path: tuple[int, ...] | None = None
    """The accepted nodes of a tree, in draft order."""

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.drafted:
            raise ValueError(f"accepted must be in [0, drafted], got {self.accepted} of {self.drafted}")
        if self.path is not None and len(self.path) != self.accepted:
            raise ValueError(f"a path of {len(self.path)} nodes cannot be {self.accepted} accepted")

    @property
    def has_first(self) -> bool:
        """Whether the first node drafted was accepted."""
        return self.accepted > 0 and (self.path is None or self.path[0] == 0)

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted. Not alpha: the published rules compare this one."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Drafting:
    """What one method was asked for in a step."""

    method: str
    depth: int
    """The deepest draft asked for, answered or not."""
    seconds: float
    read_tokens: int = 0
    """What its draft first had to read: all that was written without it."""
    read_seconds: float = 0.0
    """Not part of `seconds`."""


@dataclass(frozen=True, slots=True)
class StepObservation:
    """One step of the engine. Seconds are what the step waited: work hidden behind the target's pass costs nothing."""

    batch: int
    """Sequences that decoded in this step."""
    rows: int
    """Target rows of those sequences, drafts included: `room` when nothing was drafted."""
    prefill_rows: int
    drafting: tuple[Drafting, ...]
    """Empty if the proposers were left alone."""
    verify_seconds: float
    network_seconds: float
    rounds: tuple[RoundObservation, ...]
    is_timed: bool = True
    """Whether its seconds are those of steps to come. A step taken another way than most says what was accepted, not what
    it costs."""
    context: int = 0
    """Tokens that the sequences have which decoded: a pass reads them all."""
    seats: int | None = None
    """Sequences that the pass was padded to, in `rows` too; None: it was not."""
    boarding_seconds: float = 0.0
    """For which nothing was computed before it, since it was to draft and those before it were not."""

    @property
    def room(self) -> int:
        """Sequences that the pass was as large as."""
        return self.batch if self.seats is None else self.seats

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        drafting = sum(drafting.seconds + drafting.read_seconds for drafting in self.drafting)
        return self.boarding_seconds + self.verify_seconds + self.network_seconds + drafting


def method_of(category: str) -> str:
    """The part before the slash: what drafting costs depends on the method alone."""
    return category.partition("/")[0]


class Candidate(NamedTuple):
    """A sequence about to decode. `max_depth` is the least of what request, server and breaker allow; 0 forbids
    drafting."""

    sequence_id: int
    category: str
    max_depth: int
    num_tokens: int = 0
    """That it has, its prompt included."""
    remaining: int | None = None
    """Tokens it may still have; None: not known."""


class DepthPolicy(Protocol):
    @property
    def advantage(self) -> float | None:
        """Speed expected of drafting over plain decoding at the last decision; None for a policy that does not know."""
        ...

    def observe(self, step: StepObservation) -> None:
        """Learn from a step that has been committed."""
        ...

    def restart(self, category: str, alpha: float) -> None:
        """The category is no longer what was observed of it; `alpha` is the new acceptance of its first drafts."""
        ...

    def rests(self, batch: int) -> bool:
        """Whether none of so many gets a draft in this step, whoever they are. Then `decide` is not asked: it has to look at
        each of them."""
        ...

    def decide(self, batch: Sequence[Candidate]) -> list[int]:
        """A depth for each candidate, in order, between 0 and its `max_depth`. Called once a step with all that
        decode."""
        ...
