"""The arrivals of one request's tokens, in seconds on one clock."""

from dataclasses import dataclass

from paceline.core.output import StepOutput


@dataclass(frozen=True, slots=True)
class Arrival:
    """The tokens of one step, which arrive together."""

    at: float
    tokens: int
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, output: StepOutput, at: float) -> "Arrival":
        return cls(at, len(output.tokens), output.drafted, output.accepted)


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """One request and its answer."""

    category: str
    started: float
    arrivals: tuple[Arrival, ...]
    text: str
    token_ids: tuple[int, ...] | None = None
    """Token ids. None if the server returns text only."""
    rounds: int | None = None
    """Passes of the target after the first token. 0 if the number is unknown. None if every arrival is a pass."""

    @property
    def tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1].at - self.started if self.arrivals else 0.0

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0].at - self.started if self.arrivals else None

    @property
    def token_seconds(self) -> list[float]:
        """The time of each token after the first arrival. Tokens that arrive together share it."""
        waits: list[float] = []
        last = self.arrivals[0].at if self.arrivals else 0.0
        for arrival in self.arrivals[1:]:
            if arrival.tokens:
                waits += [(arrival.at - last) / arrival.tokens] * arrival.tokens
                last = arrival.at
        return waits

    @property
    def num_rounds(self) -> int:
        """Passes of the target after the prefill."""
        return max(0, len(self.arrivals) - 1) if self.rounds is None else self.rounds

    @property
    def round_tokens(self) -> int:
        """Tokens of those rounds. 0 if the number is unknown."""
        return self.tokens - 1 if self.num_rounds else 0
