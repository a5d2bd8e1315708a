"""What a draft worker asks of whatever drafts for it: the next token of many rides, one pass at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Verification
from paceline.runtime.draft_worker.distributions import Law


@dataclass(frozen=True, slots=True)
class Facts:
    """What a target said of a sequence when it opened it."""

    sampling: SamplingParams
    seed: int
    choice: int
    num_prompt: int
    rule: Verification
    salt: str

    @property
    def wants_law(self) -> bool:
        return self.rule == "rejection" and not self.sampling.is_greedy


@dataclass(slots=True, eq=False)
class Ride:
    """A text that is being drafted: committed tokens, then guessed ones."""

    id: int
    facts: Facts
    ids: list[int]
    num_committed: int
    """Of `ids`; the rest may yet be taken back."""
    num_cached: int = field(default=0, init=False)
    """The core's: of `ids`, those it has computed."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drafted token."""

    token: int
    rivals: tuple[int, ...] = ()
    """Tokens that the target may choose there instead, likeliest first; under rejection `token` may be among them."""
    law: Law | None = None


class DraftCore(Protocol):
    """One pass computes a token for each of many rides. Nothing is computed for a ride until it is stepped."""

    def step(self, rides: Sequence[Ride]) -> list[Drawn | None]:
        """The token after each ride's `ids`. None: its prompt is still being computed, or there is no room for it now."""
        ...

    def fork(self, ride: Ride, child: Ride) -> None:
        """Let `child` start from what `ride` has computed of the text they share."""
        ...

    def cut(self, ride: Ride, length: int) -> None:
        """Take back all of `ride` past `length`. Its children must be closed first."""
        ...

    def close(self, rides: Sequence[Ride]) -> None:
        """Free what these hold."""
        ...
