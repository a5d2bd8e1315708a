"""What a proposer with a cache of its own has to read before it can draft: all that was written without it."""

from dataclasses import dataclass

from paceline.speculation.proposer import Proposer


@dataclass(frozen=True, slots=True)
class Reading:
    tokens: int = 0
    """Found in a cache or computed."""
    seconds: float = 0.0

    def __add__(self, other: "Reading") -> "Reading":
        return Reading(self.tokens + other.tokens, self.seconds + other.seconds)


NO_READING = Reading()


def take_reading(proposer: Proposer) -> Reading:
    """What the proposer's `reading` has come to since the last time of asking; most have none."""
    taken: Reading = getattr(proposer, "reading", NO_READING)
    if taken.tokens:
        proposer.reading = NO_READING  # type: ignore[attr-defined]  # it has one
    return taken
